"""Chapter measure: what instruments say is what happened, and no more than they can know."""
