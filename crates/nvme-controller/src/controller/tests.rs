//! Complete commands, submitted as by a transport: which are rejected and with which status, and that
//! every advertised capability works.

mod bench;
mod binding;
mod change_queue;
mod events;
mod features;
mod firmware;
mod format;
mod hostile;
mod identify;
mod logs;
mod management;
mod persistence;
mod queues;
mod reservations;
mod self_test;
mod subsystem;
mod visibility;
