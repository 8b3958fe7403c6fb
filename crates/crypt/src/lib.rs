//! Block devices that hold nothing readable: `crypt:[URI]?key-file=PATH`.
//!
//! AES-256 in XTS mode (IEEE 1619) over units of 512 bytes, whatever the block size, each with the
//! number of its unit as tweak. That is what Linux calls `aes-xts-plain64` with sectors of 512
//! bytes, so `dmsetup` and `cryptsetup --type plain` read what is written here, and the other way
//! round.
//!
//! What it hides and what not: whoever has the device without the key learns which blocks were
//! written and which are deallocated, and whether a block is what it was before; and can put an old
//! block back unnoticed. There is no header: the wrong key reads garbage, and nothing says so.
//!
//! # Unsafe
//!
//! [`cipher`] is the one room with `unsafe` code in it, around AWS-LC. What it promises stands at its
//! top; all other modules forbid it.

mod channel;
mod cipher;
#[forbid(unsafe_code)]
mod key;

use std::path::PathBuf;
use std::sync::Arc;

use base::{Backend, Blame, Limits, Medium, Operation, Support};
use block::uri::Uri;
use block::{MediumError, Opened, Opener};
use dma::Regions;

use self::channel::{BUFFER_BYTES, CryptChannel, DEPTH_MAX, SEGMENTS_MAX};
pub use self::key::Key;

/// A medium whose blocks are encrypted on another one.
pub struct Crypt {
    inner: Arc<dyn Medium>,
    key: Arc<Key>,
    regions: Regions,
    limits: Limits,
}

/// What can be done through a cipher. Zeroes would have to be written encrypted, and a copy would
/// have the tweaks of its source: whoever needs these has them done by reads and writes.
const SUPPORT: Support = Support::of(&[
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
/// If the name or the key file is not as it should be, or the device below cannot be had.
pub fn open(opener: &Opener<'_>, uri: &Uri) -> Result<Opened, MediumError> {
    let mut fields = uri.fields();
    if fields.text("key").is_some() {
        // The name is not repeated: it has a key in it.
        return Err(MediumError::new(
            Blame::Caller,
            "crypt: found a key in the name, where other users of the machine and the history of \
             the shell can read it; expected key-file=PATH",
        ));
    }
    let path = fields.text("key-file");
    fields.finish()?;
    let path = path.ok_or_else(|| {
        uri.refuse(format!("the key is missing, expected crypt:[{}]?key-file=PATH", "ram:1g"))
    })?;
    let below = opener.open(uri.only_child()?)?;
    let key = Key::read(&PathBuf::from(path))
        .map_err(|problem| MediumError::new(Blame::Caller, format!("crypt: {problem}")))?;
    let crypt = Crypt::new(opener.regions, below.medium, key)?;
    let description = format!("AES-256-XTS over units of 512 bytes; over {}", below.description);
    Ok(Opened { medium: Arc::new(crypt), description, ..below })
}

impl Crypt {
    /// Encrypts what is on `inner`. Requests name memory of `regions`, in which each channel takes
    /// a place.
    ///
    /// # Errors
    ///
    /// If the blocks of `inner` have metadata, which would stay readable.
    pub fn new(regions: &Regions, inner: Arc<dyn Medium>, key: Key) -> Result<Self, MediumError> {
        let below = inner.limits();
        if below.metadata_size != 0 {
            let found = below.metadata_size;
            let text = format!("crypt: {found} bytes of metadata in each block, expected none");
            return Err(MediumError::new(Blame::Caller, text));
        }
        let limits = Limits {
            request_blocks_max: below.request_blocks_max.min(BUFFER_BYTES / below.block_size),
            segments_max: SEGMENTS_MAX,
            depth_max: below.depth_max.min(DEPTH_MAX),
            support: below.support.common(SUPPORT),
            ..below
        };
        Ok(Self { inner, key: Arc::new(key), regions: regions.clone(), limits })
    }
}

/// Nothing that reads as zeroes below reads as zeroes here, so no extent is anything but data.
impl Medium for Crypt {
    fn limits(&self) -> Limits {
        self.limits.clone()
    }

    fn channel(&self) -> Result<Box<dyn Backend>, String> {
        let inner = self.inner.channel()?;
        let channel =
            CryptChannel::new(inner, &self.key, self.regions.clone(), self.limits.clone())?;
        Ok(Box::new(channel))
    }

    fn channels_max(&self) -> u32 {
        self.inner.channels_max()
    }
}

impl std::fmt::Debug for Crypt {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Crypt").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
