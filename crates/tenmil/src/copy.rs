//! A whole device to another.
//!
//! ```text
//!   source ──extents──> holes ───────────────────> zeroes on the target, or nothing
//!      └────read──────> data, several requests ──> write
//!                                 │
//!                   now and then: flush ──> record, from which another run goes on
//! ```
//!
//! Everything here turns on the caller's thread: extents may be asked of a disk, which nobody but
//! this copy waits for. Memory is bounded by the depth, and no request is larger than both sides
//! take.

mod check;
mod drive;
mod geometry;
mod identity;
mod outcome;
mod pass;
mod record;
mod side;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use base::Medium;
use dma::Regions;
use host::Clock;

pub use self::drive::Watch;
pub use self::identity::{Identity, files_of};
pub use self::outcome::{Comparison, Ending, Tally, Which};
pub use self::pass::Keep;
pub use self::record::{Record, usual_path};

use self::check::Check;
use self::geometry::Geometry;
use self::pass::Pass;
use crate::Refused;

/// How to copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyOptions {
    /// Requests in flight.
    pub depth: u32,
    /// Bytes in each of them, if both sides take as many.
    pub request_bytes: u64,
    /// Whether zeroes that the source holds as data become holes of the target.
    pub sparse: bool,
    /// What to do about blocks that cannot be read.
    pub on_error: OnError,
}

/// What to do about blocks that cannot be read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnError {
    /// End, and name them.
    #[default]
    Stop,
    /// Write zeroes in their place, and count them.
    Skip,
}

/// Both sides, and the memory between them.
pub struct Devices {
    /// What is read.
    pub source: Arc<dyn Medium>,
    /// What is written.
    pub target: Arc<dyn Medium>,
    /// The table in which the memory of requests is: that of both devices.
    pub regions: Regions,
}

/// A copy that fits its devices.
pub struct Copy {
    devices: Devices,
    options: CopyOptions,
    geometry: Geometry,
}

impl Default for CopyOptions {
    fn default() -> Self {
        let (depth, request_bytes) = (8, 1 << 20);
        Self { depth, request_bytes, sparse: true, on_error: OnError::Stop }
    }
}

impl Copy {
    /// A copy between devices that are called so.
    ///
    /// # Errors
    ///
    /// If the target is smaller than the source, or one of them cannot do its part.
    pub fn new(
        devices: Devices,
        options: CopyOptions,
        (source, target): (&str, &str),
    ) -> Result<Self, Refused> {
        let limits = (devices.source.limits(), devices.target.limits());
        let geometry = Geometry::of((source, &limits.0), (target, &limits.1), &options)?;
        Ok(Self { devices, options, geometry })
    }

    /// How long the source is, in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.geometry.size
    }

    /// Bytes that go at once.
    pub fn chunk_bytes(&self) -> u64 {
        self.geometry.chunk
    }

    /// Copies what `from` does not say is done. When this returns nothing is in flight, and
    /// everything up to [`Tally::until`] is surely on the target.
    pub fn run(
        &self,
        from: Tally,
        clock: &Clock,
        keep: &mut dyn Keep,
        watch: &mut Watch<'_>,
    ) -> (Tally, Option<Ending>) {
        let began = from.clone();
        let pass = Pass::new(&self.devices, &self.options, self.geometry, from, keep);
        let driven = pass.and_then(|mut pass| {
            drive::drive(&mut pass, clock, &mut *watch)?;
            Ok(pass.end())
        });
        driven.unwrap_or_else(|text| (began, Some(Ending::Machine(text))))
    }

    /// Reads both sides and compares them, without what `tally` says could not be read.
    pub fn compare(
        &self,
        tally: &Tally,
        clock: &Clock,
        watch: &mut Watch<'_>,
    ) -> (Comparison, Option<Ending>) {
        let check = Check::new(&self.devices, self.geometry, tally);
        let driven = check.and_then(|mut check| {
            drive::drive(&mut check, clock, &mut *watch)?;
            Ok(check.end())
        });
        driven.unwrap_or_else(|text| (Comparison::default(), Some(Ending::Machine(text))))
    }
}

/// Keeps nothing: for copies that begin anew if they are not finished.
impl Keep for () {
    fn keep(&mut self, _until: u64, _lost: &[std::ops::Range<u64>]) -> Result<(), String> {
        Ok(())
    }
}
