//! Complete commands, submitted as by a transport: which are rejected and with which status, and that
//! every advertised capability works.

mod change_queue;
mod events;
mod features;
mod firmware;
mod fixture;
mod format;
mod host_binding;
mod identify;
mod logs;
mod management;
mod persistence;
mod queues;
mod random_commands;
mod reservations;
mod self_test;
mod subsystem;
mod visibility;
