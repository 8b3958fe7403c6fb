//! Reactor errors.

use std::fmt;

use tenmil_base::ErrorCategory;
use tenmil_linux::{CpuList, Errno};

use crate::adaptive_spin::PollMode;
use crate::poller::WakeKind;
use crate::registry::{ReactorId, ThreadId};

/// Operation rejected by the reactors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReactorError {
    /// No cores were given.
    NoCores,
    /// A core that is not available to this process.
    UnknownCore {
        /// The core.
        core: u32,
        /// Available cores.
        allowed: CpuList,
    },
    /// The mask of a thread contains no core with a reactor.
    MaskOutside {
        /// Thread name.
        thread: String,
        /// Its mask.
        mask: CpuList,
        /// Cores with reactors.
        cores: CpuList,
    },
    /// The thread cannot leave its reactor.
    Pinned {
        /// Thread name.
        thread: String,
        /// The pinned poller.
        poller: String,
        /// Reason.
        reason: &'static str,
    },
    /// No such reactor.
    UnknownReactor {
        /// Reactor number.
        reactor: ReactorId,
        /// Number of reactors.
        count: usize,
    },
    /// No such thread, or it has ended.
    UnknownThread(ThreadId),
    /// Nothing wakes the poller, and its reactor sleeps.
    NoWakeSource {
        /// Poller name.
        poller: String,
        /// Poll mode of the reactor, current or requested.
        mode: PollMode,
    },
    /// The poller declares a wake-up source whose method it does not implement: it would sleep
    /// forever.
    MissingWakeCall {
        /// Poller name.
        poller: String,
        /// Declared wake-up source.
        woken_by: WakeKind,
        /// Missing method of [`Poller`](crate::Poller).
        unsaid: &'static str,
    },
    /// The thread has no poller number left.
    TooManyPollers {
        /// The poller that was not added.
        poller: String,
    },
    /// The command inbox of the reactor is full.
    InboxFull(ReactorId),
    /// The reactor has stopped.
    Stopped(ReactorId),
    /// A system resource for a reactor is missing.
    Os {
        /// What was requested.
        what: &'static str,
        /// Error of the system call.
        errno: Errno,
    },
}

impl ReactorError {
    /// Error category.
    pub const fn category(&self) -> ErrorCategory {
        match self {
            Self::Os { .. } => ErrorCategory::Environment,
            _ => ErrorCategory::Usage,
        }
    }

    pub(crate) fn from_io_error(what: &'static str, error: &std::io::Error) -> Self {
        Self::Os { what, errno: Errno::from_io_error(error).unwrap_or(Errno::IO) }
    }
}

impl fmt::Display for ReactorError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoCores => out.write_str("start reactors: no cores were given"),
            Self::UnknownCore { core, allowed } => {
                write!(out, "start reactors: core {core}, expected one of {allowed}")
            }
            Self::MaskOutside { thread, mask, cores } => {
                write!(out, "thread '{thread}': mask {mask}, expected one of the cores {cores}")
            }
            Self::Pinned { thread, poller, reason } => write!(
                out,
                "thread '{thread}': poller '{poller}' cannot leave its reactor: {reason}"
            ),
            Self::UnknownReactor { reactor, count } => {
                write!(out, "reactor {reactor}: expected a number below {count}")
            }
            Self::UnknownThread(thread) => {
                write!(out, "thread {thread}: there is none, or no more")
            }
            Self::NoWakeSource { poller, mode } => write!(
                out,
                "poller '{poller}': nothing wakes it, expected a wake source in poll mode {mode}"
            ),
            Self::MissingWakeCall { poller, woken_by, unsaid } => write!(
                out,
                "poller '{poller}': woken by {woken_by}, and it does not report when, expected a \
                 `{unsaid}` of its own"
            ),
            Self::TooManyPollers { poller } => {
                write!(out, "poller '{poller}': its thread has 65536 already")
            }
            Self::InboxFull(reactor) => {
                write!(out, "reactor {reactor}: its inbox is full, try again later")
            }
            Self::Stopped(reactor) => write!(out, "reactor {reactor}: it has stopped"),
            Self::Os { what, errno } => write!(out, "{what}: {errno}"),
        }
    }
}

impl std::error::Error for ReactorError {}
