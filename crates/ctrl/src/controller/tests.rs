//! Whole commands, as a front end hands them in: what is refused and with what, and that whatever
//! is advertised works.

mod bench;
mod binding;
mod events;
mod features;
mod firmware;
mod format;
mod hostile;
mod identify;
mod line;
mod logs;
mod management;
mod persistence;
mod queues;
mod reservations;
mod self_test;
mod subsystem;
mod visibility;
