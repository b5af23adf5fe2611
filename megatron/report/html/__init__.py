"""Results as one HTML page that needs no network: gathered over seeds (gather), drawn (figures), written (page)."""
