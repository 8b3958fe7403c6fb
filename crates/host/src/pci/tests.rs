//! Machines made of files, and a kernel that does what it is told.

mod crash;
mod kernel;
mod steps;
mod tree;
mod verdicts;
