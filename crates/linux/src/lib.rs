//! Linux interfaces: clocks, CPUs, threads, files, sockets, block devices and PCI binding.
//!
//! | module | contents |
//! |---|---|
//! | [`clock`] | monotonic clock, read from the TSC in a few nanoseconds |
//! | [`cpu_list`], [`kernel_files`], [`cgroup`], [`cpu_topology`] | CPUs of the machine and of this process |
//! | [`frequency_control`] | CPU frequency control (cpufreq), and its restoration |
//! | [`named_thread`] | named, pinned threads with a stop flag |
//! | [`machine_environment`] | machine and load conditions under which a measurement was made |
//! | [`doctor`], [`ethtool`] | checks of the machine's configuration, with fixes |
//! | [`eventfd_vectors`] | interrupt vectors backed by eventfds |
//! | [`mod@mailbox`], [`wakeup`] | messages between threads; sleep and wake-up without lost notifications |
//! | [`event_loop`] | loop of a polling thread: reads the clock and blocks between iterations |
//! | [`thread_pool`] | threads for blocking work |
//! | [`thread_state`] | state, system call and stack of another thread of this process |
//! | [`signal`] | SIGINT, SIGTERM and SIGHUP as flags |
//! | [`pty`] | pseudo-terminal for tests of interactive programs |
//! | [`process_log`], [`journal`] | non-blocking log, rate-limited per cause; the journal of systemd |
//! | [`notify`], [`passed_sockets`] | notifications to systemd, and sockets that it passes |
//! | [`local_socket`], [`runtime_directory`] | Unix sockets between a user's processes |
//! | [`sandbox`] | capabilities, Landlock, seccomp and the user of a server that runs |
//! | [`socket`] | non-blocking streams for the network protocols |
//! | [`socket_stream`] | Unix and TCP streams that read and write region memory |
//! | [`poll_set`] | epoll set off the data path |
//! | [`key_file`], [`key_directory`] | key files, rejected if other users can read them |
//! | [`kernel_keyring`] | keys in a keyring of the kernel |
//! | [`secret_memory`] | memory for secrets: locked, and in no core dump |
//! | [`machine_identity_key`] | number that identifies this machine |
//! | [`process_stats`] | CPU time, memory and descriptors used by this process |
//! | [`open_files`] | files and devices that this process has open |
//! | [`device_users`] | users of a file or a block device, and device identity |
//! | [`pci`] | NVMe functions on the PCI bus, and binding them to a driver |
//! | [`uevent`] | kernel device events |
//! | [`ublk`] | server side of ublk block devices |
//! | [`mod@storage_file`], [`file_engine`] | files, and asynchronous I/O on them |
//!
//! # Unsafe
//!
//! This crate is one of the few that may contain unsafe code. Its safe interface guarantees:
//!
//! - The kernel receives addresses of region memory only, resolved by [`tenmil_dma::RegionTable`], and an
//!   engine keeps a handle to the regions until the kernel has completed every job that names them.
//! - What the kernel writes into the table of a ublk queue is copied out word by word. The memory
//!   that a ublk control command names stays valid until the command completes.
//! - A message slot of a mailbox is accessed by one thread at a time: by the sender until the
//!   message is published, by the receiver afterwards. A model checker (loom) verifies this.
//! - The ring of several file engines is accessed by one thread at a time, although each engine may
//!   move to another thread. The model checker verifies the lock that ensures this.
//! - A signal handler uses atomics, a timer, a non-blocking write, and `_exit` only.
//! - A buffer for secrets owns its slot of a mapping that is unmapped only when all slots are free.
//! - A descriptor that a service manager has passed is owned once: the variables that name it are read once,
//!   before the process opens sockets, and a descriptor that is no listening socket is left alone.
//! - A keyring call receives strings and buffers that outlive it.
//! - The CPU's counter is read only where the kernel itself uses it as a clock source.

#![expect(clippy::disallowed_methods, reason = "this is the crate that may: see clippy.toml")]

mod asymmetric_barrier;
mod biased_lock;
pub mod cgroup;
pub mod clock;
pub mod cpu_list;
pub mod cpu_topology;
pub mod device_users;
pub mod doctor;
pub mod ethtool;
pub mod event_loop;
pub mod eventfd_vectors;
pub mod fd_table;
pub mod file_engine;
pub mod frequency_control;
mod io_vectors;
pub mod journal;
pub mod kernel_files;
pub mod kernel_keyring;
pub mod key_directory;
pub mod key_file;
pub mod local_socket;
#[cfg(test)]
mod loom_tests;
pub mod machine_environment;
pub mod machine_identity_key;
pub mod mailbox;
pub mod named_thread;
pub mod notify;
pub mod open_files;
pub mod owned_directory;
pub mod passed_sockets;
pub mod pci;
pub mod poll_set;
pub mod process_log;
pub mod process_stats;
pub mod pty;
mod random;
pub mod running_processes;
pub mod runtime_directory;
pub mod sandbox;
pub mod secret_memory;
pub mod signal;
pub mod socket;
pub mod socket_stream;
mod step_timer;
pub mod storage_file;
mod stream_socket;
mod sync;
pub mod tc_flower;
pub mod tcp_connection;
mod thread_engine;
mod thread_flags;
pub mod thread_pool;
pub mod thread_state;
pub mod ublk;
pub mod uevent;
mod uring_engine;
pub mod wakeup;

pub use clock::Clock;
pub use cpu_list::CpuList;
pub use event_loop::{EventLoop, NextStep};
pub use eventfd_vectors::{EventFdVectors, RemoteEventFd};
pub use machine_environment::MachineEnvironment;
pub use mailbox::{Receiver, Sender, mailbox};
pub use named_thread::{NamedThread, StopFlag};
pub use random::{fill_secure_random, random_id, random_seed};
pub use rustix::io::Errno;
pub use step_timer::{StepTimer, StepTiming};
pub use wakeup::{COALESCE_DELAY, Notifier, ParkFlag, Sleeper, WakeSources};
