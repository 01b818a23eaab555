"""HTML pages: reports, comparisons, and the live view."""
