"""How do the weights move?"""
