"""Results: the row, its files, statistics, comparisons and tables. Needs numpy, not torch."""
