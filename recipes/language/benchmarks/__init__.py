"""What the language recipe's README says was measured."""
