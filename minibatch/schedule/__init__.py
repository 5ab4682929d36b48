"""How loops and branches run when lanes diverge."""
