//! `vfio-user:` as a kind of block device.

use block::uri::Uri;
use block::{MediumError, Opened, Opener};

use super::attach;
use super::name::VfuName;

/// Attaches controllers of other processes.
#[derive(Clone, Copy, Debug)]
pub struct Kind;

impl block::Kind for Kind {
    fn open(&self, opener: &Opener<'_>, uri: &Uri) -> Result<Opened, MediumError> {
        attach(&VfuName::of(uri)?, opener.regions, opener.clock)?.open(uri)
    }
}
