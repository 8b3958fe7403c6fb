//! What can be switched on the fast path.

use dma::CommandStore;

use crate::Refused;

/// What can be switched on the fast path, each with its default first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Techniques {
    /// Ring the submission doorbell once per turn, and not for each command.
    pub doorbell_batching: bool,
    /// When the completion doorbell rings.
    pub completion_doorbell: CompletionDoorbell,
    /// With which instructions commands are stored; none means what suits the kind of device.
    pub command_store: Option<CommandStore>,
    /// What is fetched into the cache ahead of its use.
    pub prefetch: Prefetch,
    /// How completions are taken from the ring.
    pub completion_copy: CompletionCopy,
    /// Doorbells in memory, where the controller has them.
    pub shadow_doorbells: bool,
    /// Ask the kernel for huge pages.
    pub huge_pages: bool,
}

/// When the completion doorbell rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompletionDoorbell {
    /// Once per poll.
    Poll,
    /// For each completion.
    Each,
    /// Only when the controller will need the room.
    Deferred,
}

/// What is fetched into the cache ahead of its use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefetch {
    /// The slots of the next completions.
    pub slots: bool,
    /// The ring entries that will be written next.
    pub ring: bool,
    /// What `perf` itself keeps per I/O.
    pub tasks: bool,
}

/// How completions are taken from the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompletionCopy {
    /// A cache line of up to four at once.
    Line,
    /// One at a time.
    One,
}

impl Default for Techniques {
    fn default() -> Self {
        Self {
            doorbell_batching: true,
            completion_doorbell: CompletionDoorbell::Poll,
            command_store: None,
            prefetch: Prefetch { slots: false, ring: false, tasks: false },
            completion_copy: CompletionCopy::One,
            shadow_doorbells: false,
            huge_pages: true,
        }
    }
}

impl Techniques {
    /// Refuses what has no effect beside what else was asked for.
    pub(super) fn check(&self) -> Result<(), Refused> {
        let by_line = self.completion_copy == CompletionCopy::Line;
        if by_line && self.completion_doorbell == CompletionDoorbell::Each {
            return Err(Refused::caller(
                "--completion-copy line: completions are taken one by one with --cq-doorbell each, \
                 expected --cq-doorbell poll or deferred",
            ));
        }
        if self.prefetch.slots && !by_line {
            return Err(Refused::caller(
                "--prefetch slots: completions are copied one by one, expected --completion-copy \
                 line beside it",
            ));
        }
        Ok(())
    }

    /// The first flag by which something is switched in the driver, if any is.
    pub(super) fn switched_in_driver(&self) -> Option<&'static str> {
        let usual = Self::default();
        let Prefetch { slots, ring, .. } = self.prefetch;
        let switched = [
            ("--no-doorbell-batching", self.doorbell_batching != usual.doorbell_batching),
            ("--cq-doorbell", self.completion_doorbell != usual.completion_doorbell),
            ("--command-store", self.command_store != usual.command_store),
            ("--prefetch", slots || ring),
            ("--completion-copy", self.completion_copy != usual.completion_copy),
            ("--shadow-doorbells", self.shadow_doorbells != usual.shadow_doorbells),
        ];
        switched.iter().find(|(_, is_switched)| *is_switched).map(|(flag, _)| *flag)
    }
}

impl CompletionDoorbell {
    /// The name on the command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Poll => "poll",
            Self::Each => "each",
            Self::Deferred => "deferred",
        }
    }
}

impl Prefetch {
    /// Reads `all`, `none`, or some of `slots,ring,tasks`.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut prefetch = Self { slots: false, ring: false, tasks: false };
        match text {
            "all" => return Ok(Self { slots: true, ring: true, tasks: true }),
            "none" => return Ok(prefetch),
            _ => {}
        }
        for part in text.split(',') {
            match part {
                "slots" => prefetch.slots = true,
                "ring" => prefetch.ring = true,
                "tasks" => prefetch.tasks = true,
                _ => {
                    return Err(format!(
                        "no `{part}` to prefetch, expected some of slots,ring,tasks, or all, or \
                         none"
                    ));
                }
            }
        }
        Ok(prefetch)
    }

    /// The name on the command line and in reports.
    pub fn name(self) -> String {
        let parts = [(self.slots, "slots"), (self.ring, "ring"), (self.tasks, "tasks")];
        let on: Vec<&str> = parts.iter().filter(|(on, _)| *on).map(|(_, name)| *name).collect();
        match on.len() {
            0 => "none".into(),
            3 => "all".into(),
            _ => on.join(","),
        }
    }
}

impl CompletionCopy {
    /// The name on the command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Line => "line",
            Self::One => "one",
        }
    }
}
