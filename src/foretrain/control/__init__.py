"""What to do next?"""
