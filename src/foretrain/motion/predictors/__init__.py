"""Predictors: one interface and its implementations."""
