"""Run converted models on Ascend NPUs: two targets, and the verification of a device."""
