//! What is refused, and why.

use std::fmt;

use base::Blame;
use host::{Cores, Errno};

use crate::directory::{ReactorId, ThreadId};
use crate::poller::WakeKind;
use crate::spell::PollMode;

/// Something that reactors will not do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refused {
    /// No cores were given to run on.
    NoCores,
    /// A core that this process may not use.
    UnknownCore {
        /// Which.
        core: u32,
        /// Which it may use.
        allowed: Cores,
    },
    /// A thread whose mask names no core with a reactor.
    MaskOutside {
        /// The thread's name.
        thread: String,
        /// Its mask.
        mask: Cores,
        /// The cores with reactors.
        cores: Cores,
    },
    /// A thread that cannot leave its reactor.
    Tied {
        /// The thread's name.
        thread: String,
        /// The poller that cannot.
        poller: String,
        /// Why it cannot.
        reason: &'static str,
    },
    /// There is no such reactor.
    UnknownReactor {
        /// Its number.
        reactor: ReactorId,
        /// How many there are.
        count: usize,
    },
    /// There is no such thread, or it has ended.
    UnknownThread(ThreadId),
    /// A poller that nothing wakes, where reactors sleep.
    NoWakeSource {
        /// Its name.
        poller: String,
        /// How its reactor polls, or was asked to poll.
        mode: PollMode,
    },
    /// A poller that is said to be woken by something that it never speaks of: it would sleep for ever.
    NeverWoken {
        /// Its name.
        poller: String,
        /// What is said to wake it.
        woken_by: WakeKind,
        /// The method of [`Poller`](crate::Poller) that it has to have, and has not.
        unsaid: &'static str,
    },
    /// A thread with more pollers than it has numbers for.
    TooManyPollers {
        /// The poller that was one too many.
        poller: String,
    },
    /// A reactor has too many orders that it has not looked at yet.
    InboxFull(ReactorId),
    /// A reactor has ended.
    Stopped(ReactorId),
    /// The machine did not give what a reactor is made of.
    Machine {
        /// What was wanted.
        what: &'static str,
        /// What the kernel answered.
        errno: Errno,
    },
}

impl Refused {
    /// Whose move it is.
    pub const fn blame(&self) -> Blame {
        match self {
            Self::Machine { .. } => Blame::Machine,
            _ => Blame::Caller,
        }
    }

    pub(crate) fn machine(what: &'static str, error: &std::io::Error) -> Self {
        Self::Machine { what, errno: Errno::from_io_error(error).unwrap_or(Errno::IO) }
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoCores => out.write_str("start reactors: no cores were given"),
            Self::UnknownCore { core, allowed } => {
                write!(out, "start reactors: core {core}, expected one of {allowed}")
            }
            Self::MaskOutside { thread, mask, cores } => {
                write!(out, "thread '{thread}': mask {mask}, expected one of the cores {cores}")
            }
            Self::Tied { thread, poller, reason } => write!(
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
            Self::NeverWoken { poller, woken_by, unsaid } => write!(
                out,
                "poller '{poller}': woken by {woken_by}, and it does not say when, expected a \
                 `{unsaid}` of its own"
            ),
            Self::TooManyPollers { poller } => {
                write!(out, "poller '{poller}': its thread has 65536 already")
            }
            Self::InboxFull(reactor) => {
                write!(out, "reactor {reactor}: its inbox is full, try again later")
            }
            Self::Stopped(reactor) => write!(out, "reactor {reactor}: it has stopped"),
            Self::Machine { what, errno } => write!(out, "{what}: {errno}"),
        }
    }
}

impl std::error::Error for Refused {}
