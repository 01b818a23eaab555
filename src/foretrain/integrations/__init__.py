"""foretrain works inside of other tools here. Nothing imports these modules; each needs the tool of its name."""
