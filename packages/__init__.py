"""What tests import by way of the checkout; what is installed lies in src."""
