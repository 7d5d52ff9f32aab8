"""Training: recipes as data, one loop for one process or many, and run folders from which nothing is lost."""
