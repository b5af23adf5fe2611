"""Where the text of a corpus comes from: recipes, downloads, installed packages."""
