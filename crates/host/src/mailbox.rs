//! Bounded mailboxes: many threads put messages in, one takes them out, nobody waits.
//!
//! A message of 24 bytes costs half a cache line, and a pair of threads that poll exchange it at the
//! cost of moving that line. Messages of one sender arrive in their order. A full mailbox gives the
//! message back.
//!
//! Sending does not wake anybody. A sender rings the [`Bell`](crate::Bell) of a receiver that may be
//! asleep, after the last of a batch.

mod ring;

use crate::sync;

pub use ring::{Receiver, Sender, mailbox};

const _: () = assert!(Sender::<[u64; 3]>::SLOT_BYTES == 32, "two messages of 24 bytes to a line");
