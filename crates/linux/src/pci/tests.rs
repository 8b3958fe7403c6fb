//! Machines made of files, and a fake kernel.

mod crash;
mod kernel;
mod steps;
mod tree;
mod verdicts;
