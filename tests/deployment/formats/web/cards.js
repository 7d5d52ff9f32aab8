[...document.querySelectorAll(".card")].map((card) => [
  card.querySelector("h3").textContent,
  [...card.querySelectorAll(".bars li")].map((row) => [
    row.querySelector(".name").textContent,
    row.querySelector("data").value,
    row.querySelector(".share").textContent,
  ]),
])
