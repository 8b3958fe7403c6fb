//! Threads that turn: poll while busy, sleep while idle.

#![forbid(unsafe_code)]

pub mod schedule;
