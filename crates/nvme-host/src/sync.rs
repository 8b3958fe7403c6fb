//! Primitives of the queue link. Its model substitutes those of a model checker.

pub(crate) use std::sync::Arc;
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};

pub(crate) use tenmil_base::Mailbox;
