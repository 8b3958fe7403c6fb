//! `vfio-user:` as a block device kind.

use tenmil_block::uri::Uri;
use tenmil_block::{DeviceError, OpenedDevice, Opener};

use super::attach;
use super::name::VfuName;

/// Attaches controllers of other processes.
#[derive(Clone, Copy, Debug)]
pub struct Kind;

impl tenmil_block::DeviceType for Kind {
    fn open(&self, opener: &Opener<'_>, uri: &Uri) -> Result<OpenedDevice, DeviceError> {
        attach(&VfuName::of(uri)?, opener.regions, opener.clock)?.open(uri)
    }
}
