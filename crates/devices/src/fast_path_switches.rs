//! Driver options: optimizations of the I/O path that can be switched off.

use tenmil_dma::CommandStore;

/// Driver options. The variants of each option begin with the default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FastPathSwitches {
    /// Ring the submission doorbell once per iteration rather than for each command.
    pub doorbell_batching: bool,
    /// When to ring the completion doorbell.
    pub completion_doorbell: CompletionDoorbell,
    /// Instructions that store commands. None selects what suits the kind of device.
    pub command_store: Option<CommandStore>,
    /// Use shadow doorbells, if the controller supports them.
    pub shadow_doorbells: bool,
    /// Request huge pages from the kernel.
    pub huge_pages: bool,
}

/// When the completion doorbell is rung.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompletionDoorbell {
    /// Once per poll.
    Poll,
    /// For each completion.
    Each,
    /// Only when the controller is about to need free entries.
    Deferred,
}

impl Default for FastPathSwitches {
    fn default() -> Self {
        Self {
            doorbell_batching: true,
            completion_doorbell: CompletionDoorbell::Poll,
            command_store: None,
            shadow_doorbells: false,
            huge_pages: true,
        }
    }
}

impl FastPathSwitches {
    /// First flag that changes an option of the driver, if any was given.
    pub fn first_changed_driver_flag(&self) -> Option<&'static str> {
        let usual = Self::default();
        let switched = [
            ("--no-doorbell-batching", self.doorbell_batching != usual.doorbell_batching),
            ("--cq-doorbell", self.completion_doorbell != usual.completion_doorbell),
            ("--command-store", self.command_store != usual.command_store),
            ("--shadow-doorbells", self.shadow_doorbells != usual.shadow_doorbells),
        ];
        switched.iter().find(|(_, is_switched)| *is_switched).map(|(flag, _)| *flag)
    }
}

impl CompletionDoorbell {
    /// Name on the command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Poll => "poll",
            Self::Each => "each",
            Self::Deferred => "deferred",
        }
    }
}
