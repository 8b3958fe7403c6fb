//! The rest of Linux: everything that is neither memory nor a PCI function.
//!
//! | module | what it gives the house |
//! |---|---|
//! | [`clock`] | the one clock, read in a few nanoseconds |
//! | [`cores`], [`machine`], [`cgroup`], [`topology`] | which processors there are, and which of them are ours |
//! | [`frequency`] | how fast they run, and how that is put back |
//! | [`thread`] | a named thread on a processor of its own, and how it ends |
//! | [`environment`] | what a number was measured on, and what would make it better |
//! | [`doctor`], [`ethtool`] | what keeps this machine from working or being fast, and what mends it |
//! | [`event`] | interrupt vectors that are event descriptors |
//! | [`mod@mailbox`], [`bell`] | messages between threads, and how a thread sleeps without missing one |
//! | [`turn`] | the loop that reads the clock and blocks, around turns that do neither |
//! | [`pool`] | threads for what may block |
//! | [`signal`] | Ctrl-C as a flag |
//! | [`terminal`] | a terminal that is a program, to test programs on |
//! | [`log`] | log lines that block nobody, limited per cause |
//! | [`local_socket`], [`runtime_directory`] | sockets between processes of one user, and where they lie |
//! | [`socket`] | connections that never block, as the protocols use them |
//! | [`stream`] | streams to other programs, Unix and TCP, in and out of region memory |
//! | [`watch`] | waiting for many descriptors, off the data path |
//! | [`secret`] | key files, read if nobody else can |
//! | [`process`] | what this process has used |
//! | [`holders`] | who uses a file or a block device, and which device it is |
//! | [`pci`] | NVMe functions on the bus, and whether a program or the kernel has them |
//! | [`uevent`] | what the kernel says when devices come and go |
//! | [`ublk`] | what a process serves a local block device by |
//! | [`mod@file`], [`engine`] | a file, and reads and writes of it that do not block |
//!
//! # Unsafe
//!
//! This crate is part of the machine wing. What its safe face promises:
//!
//! - The kernel is given addresses of region memory only, resolved by [`dma::Regions`], and an
//!   engine keeps a handle to the regions until the kernel has ended every job that names them.
//! - What the kernel writes into the table of a ublk queue is copied out word by word; its control
//!   commands name memory that stays until they are answered.
//! - A message in a mailbox is touched by the one thread whose turn it is: by its sender until it is
//!   published, by the receiver from then on. A model checker tries that in every order.
//! - A signal handler uses atomics, a timer, a write that does not wait, and `_exit`.
//! - The processor's counter is read where the kernel itself uses it as a clock.

#![expect(clippy::disallowed_methods, reason = "this is the crate that may: see clippy.toml")]

mod barrier;
pub mod bell;
pub mod cgroup;
pub mod clock;
pub mod cores;
pub mod descriptors;
pub mod doctor;
pub mod engine;
pub mod environment;
pub mod ethtool;
pub mod event;
pub mod file;
pub mod filters;
pub mod frequency;
pub mod holders;
pub mod local_socket;
pub mod log;
pub mod machine;
pub mod mailbox;
#[cfg(test)]
mod model;
pub mod owned_directory;
pub mod pci;
pub mod pool;
pub mod process;
mod random;
pub mod runtime_directory;
pub mod secret;
pub mod signal;
pub mod socket;
mod steps;
pub mod stream;
mod sync;
pub mod terminal;
pub mod thread;
pub mod topology;
pub mod turn;
pub mod ublk;
pub mod uevent;
mod uring;
mod vectored;
pub mod watch;
mod workers;

pub use bell::{Bell, Doze, LINGER, Sleeper, Sources};
pub use clock::Clock;
pub use cores::Cores;
pub use environment::Environment;
pub use event::{EventVectors, Line};
pub use mailbox::{Receiver, Sender, mailbox};
pub use random::{random_id, random_seed};
pub use rustix::io::Errno;
pub use steps::{Steps, Took};
pub use thread::{Stop, Thread};
pub use turn::{Turn, Wait};
