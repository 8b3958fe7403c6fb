//! Synchronization primitives of the mailbox.
//!
//! The mailbox is compiled twice. Here the primitives are the real ones; in `mailbox_tests`, a module
//! of the same name supplies the types of the loom model checker.

pub(crate) use std::sync::atomic::{AtomicBool, Ordering};
pub(crate) use std::sync::{Mutex, MutexGuard};
