//! What media do that they should not.

use base::{Operation, Outcome, Span};

/// One planned fault of a medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MediumMischief {
    /// What goes wrong.
    pub fault: MediumFault,
    /// For which operation; `None` for all.
    pub operation: Option<Operation>,
    /// Occasions that are let pass first.
    pub skip: u32,
    /// Occasions that are used then.
    pub times: u32,
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MediumFault {
    /// A request is answered with this and not carried out.
    Fail(Outcome),
    /// A request is never answered.
    Stall,
    /// A request takes so much longer.
    Delay(Span),
    /// A write is answered and not carried out.
    Lose,
    /// A write lands so many blocks further on, and from the last block on again at the first.
    Misdirect {
        /// How many.
        by: u64,
    },
    /// Of a write only the first half lands.
    Tear,
    /// A flush, or the FUA of a write, is answered and not carried out.
    ForgetFlush,
}

impl MediumMischief {
    /// For one operation, from the start, for good.
    pub const fn on(operation: Operation, fault: MediumFault) -> Self {
        Self { fault, operation: Some(operation), skip: 0, times: u32::MAX }
    }

    /// For all operations, from the start, for good.
    pub const fn always(fault: MediumFault) -> Self {
        Self { fault, operation: None, skip: 0, times: u32::MAX }
    }

    /// Not before so many occasions have passed.
    #[must_use]
    pub const fn skip(self, skip: u32) -> Self {
        Self { skip, ..self }
    }

    /// So often.
    #[must_use]
    pub const fn times(self, times: u32) -> Self {
        Self { times, ..self }
    }
}
