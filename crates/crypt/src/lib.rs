//! Encrypted block devices: `crypt:[URI]?key-file=PATH`.
//!
//! AES-256 in XTS mode (IEEE 1619) over units of 512 bytes, independent of the block size, each
//! with its unit number as tweak. This is the format that Linux calls `aes-xts-plain64` with
//! 512-byte sectors, so `dmsetup` and `cryptsetup --type plain` read what is written here, and vice
//! versa.
//!
//! Limits of the protection: an attacker with the device but without the key learns which blocks
//! were written or deallocated and whether a block has changed, and can replay an old block
//! undetected. There is no header: a wrong key is not detected and reads garbage.
//!
//! # Unsafe
//!
//! Only [`cipher`] contains unsafe code, around AWS-LC; its guarantees are stated at its top. All
//! other modules forbid unsafe code.

mod channel;
mod cipher;
#[forbid(unsafe_code)]
mod key;

use std::path::PathBuf;
use std::sync::Arc;

use tenmil_base::Error;
use tenmil_base::{BlockDevice, ErrorCategory, IoChannel, Limits, Operation, OperationSet};
use tenmil_block::uri::Uri;
use tenmil_block::{OpenedDevice, Opener};
use tenmil_dma::RegionTable;

use self::channel::{BUFFER_BYTES, CryptChannel, DEPTH_MAX, SEGMENTS_MAX};
pub use self::key::XtsKey;

/// Block device that is stored encrypted on another one.
pub struct CryptDevice {
    inner: Arc<dyn BlockDevice>,
    key: Arc<XtsKey>,
    regions: RegionTable,
    limits: Limits,
}

/// Supported operations. Zeroes would have to be written encrypted, and a copy would keep the
/// tweaks of its source: these are emulated by reads and writes in a layer above.
const SUPPORT: OperationSet = OperationSet::from_operations(&[
    Operation::Read,
    Operation::Write,
    Operation::Flush,
    Operation::Deallocate,
    Operation::Compare,
    Operation::WriteUncorrectable,
    Operation::Verify,
]);

/// Opens `crypt:[URI]?key-file=PATH`.
///
/// # Errors
///
/// If the URI or the key file is invalid, or the underlying device cannot be opened.
pub fn open(opener: &Opener<'_>, uri: &Uri) -> Result<OpenedDevice, Error> {
    let mut fields = uri.options();
    if fields.text_value("key").is_some() {
        // The URI is not repeated in the message: it contains a key.
        return Err(Error::new(
            ErrorCategory::Usage,
            "crypt: found a key in the name, where other users of the machine and the history of \
             the shell can read it; expected key-file=PATH",
        ));
    }
    let path = fields.text_value("key-file");
    fields.reject_unconsumed()?;
    let path = path.ok_or_else(|| {
        uri.error(format!("the key is missing, expected crypt:[{}]?key-file=PATH", "ram:1g"))
    })?;
    let below = opener.open(uri.single_child()?)?;
    let key = XtsKey::read(&PathBuf::from(path))
        .map_err(|problem| Error::new(ErrorCategory::Usage, format!("crypt: {problem}")))?;
    let crypt = CryptDevice::new(opener.regions, below.medium, key)?;
    let description = format!("AES-256-XTS over units of 512 bytes; over {}", below.description);
    Ok(OpenedDevice { medium: Arc::new(crypt), description, ..below })
}

impl CryptDevice {
    /// Creates an encrypted device on `inner`. Requests name memory of `regions`, in which each
    /// channel allocates its bounce buffers.
    ///
    /// # Errors
    ///
    /// If the blocks of `inner` have metadata, which would not be encrypted.
    pub fn new(
        regions: &RegionTable,
        inner: Arc<dyn BlockDevice>,
        key: XtsKey,
    ) -> Result<Self, Error> {
        let below = inner.limits();
        if below.metadata_size != 0 {
            let found = below.metadata_size;
            let text = format!("crypt: {found} bytes of metadata in each block, expected none");
            return Err(Error::new(ErrorCategory::Usage, text));
        }
        let limits = Limits {
            request_blocks_max: below.request_blocks_max.min(BUFFER_BYTES / below.block_size),
            segments_max: SEGMENTS_MAX,
            depth_max: below.depth_max.min(DEPTH_MAX),
            operations: below.operations.intersection(SUPPORT),
            ..below
        };
        Ok(Self { inner, key: Arc::new(key), regions: regions.clone(), limits })
    }
}

/// Zeroes of the underlying device do not decrypt to zeroes, so every extent is data.
impl BlockDevice for CryptDevice {
    fn limits(&self) -> Limits {
        self.limits.clone()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        let inner = self.inner.channel()?;
        let channel =
            CryptChannel::new(inner, &self.key, self.regions.clone(), self.limits.clone())?;
        Ok(Box::new(channel))
    }

    fn channels_max(&self) -> u32 {
        self.inner.channels_max()
    }
}

impl std::fmt::Debug for CryptDevice {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Crypt").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
