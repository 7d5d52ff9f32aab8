([files, kind]) => {
  const carried = new DataTransfer();
  for (const [name, bytes] of files) carried.items.add(new File([new Uint8Array(bytes)], name));
  const options = { bubbles: true, cancelable: true };
  document.getElementById("drop").dispatchEvent(kind === "paste"
    ? new ClipboardEvent("paste", { ...options, clipboardData: carried })
    : new DragEvent(kind, { ...options, dataTransfer: carried }));
}
