//! Machines made of files, and a fake kernel.

mod bind_obstacles;
mod crash;
mod fake_kernel;
mod steps;
mod test_tree;
