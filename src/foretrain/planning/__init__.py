"""How much memory a run will take, from its shapes alone, and which settings fit a budget."""
