"""Orchestrator mode: worker groups of several models."""
