//! Media faults.

use tenmil_base::{IoStatus, Operation, Span};

/// One planned media fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedMediumFault {
    /// Kind of fault.
    pub fault: MediumFault,
    /// Operation it applies to. `None` for all.
    pub operation: Option<Operation>,
    /// Number of opportunities to skip first.
    pub skip: u32,
    /// Number of times it is injected after that.
    pub times: u32,
}

/// Kind of media fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MediumFault {
    /// A request completes with this status and is not executed.
    Fail(IoStatus),
    /// A request never completes.
    Stall,
    /// A request takes this much longer.
    Delay(Span),
    /// A write completes and is not executed.
    LostWrite,
    /// A write goes to blocks at an offset, modulo the size of the medium.
    Misdirect {
        /// Offset in blocks.
        by: u64,
    },
    /// Only the first half of a write is executed.
    Tear,
    /// A flush, or the FUA of a write, completes and is not executed.
    ForgetFlush,
}

impl PlannedMediumFault {
    /// Fault for one operation, from the start, without limit.
    pub const fn for_operation(operation: Operation, fault: MediumFault) -> Self {
        Self { fault, operation: Some(operation), skip: 0, times: u32::MAX }
    }

    /// Fault for all operations, from the start, without limit.
    pub const fn for_all_operations(fault: MediumFault) -> Self {
        Self { fault, operation: None, skip: 0, times: u32::MAX }
    }

    /// Sets the number of opportunities to skip.
    #[must_use]
    pub const fn with_skip(self, skip: u32) -> Self {
        Self { skip, ..self }
    }

    /// Sets the count.
    #[must_use]
    pub const fn with_count(self, times: u32) -> Self {
        Self { times, ..self }
    }
}
