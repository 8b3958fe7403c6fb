//! From a name to a medium.

use std::fmt;
use std::sync::Arc;

use base::{Blame, Medium};
use dma::Regions;
use host::Clock;

use crate::backend::{delay, fault, file, mirror, model, null, ram, split, store, stripe};
use crate::mirror::MirrorHandle;
use crate::uri::{Uri, UriError};
use crate::{DelayHandle, Existing, FaultHandle, MediumError};

/// What every device of a run is opened with. Devices that stand on others open those with the same.
pub struct Opener<'a> {
    /// The table that resolves the segments of every request. A device takes places in it: one for
    /// what it keeps in memory, and one or two for each of its channels.
    pub regions: &'a Regions,
    /// What reads the time for devices that turn on threads of their own.
    pub clock: Clock,
    /// What all that is random comes from, unless a name says otherwise.
    pub seed: u64,
    /// Kinds of devices that are made on higher floors. One that is called like a kind of this
    /// floor stands in for it.
    pub more: &'a [(&'a str, &'a dyn Kind)],
}

/// One kind of device: what stands behind a scheme.
pub trait Kind: Sync {
    /// Opens the device that `uri` names.
    ///
    /// # Errors
    ///
    /// If the name says what this kind does not know, or the device cannot be had.
    fn open(&self, opener: &Opener<'_>, uri: &Uri) -> Result<Opened, MediumError>;
}

impl<F: Sync> Kind for F
where
    F: Fn(&Opener<'_>, &Uri) -> Result<Opened, MediumError>,
{
    fn open(&self, opener: &Opener<'_>, uri: &Uri) -> Result<Opened, MediumError> {
        self(opener, uri)
    }
}

/// An opened medium, and what to tell people about it.
#[derive(Clone)]
pub struct Opened {
    /// The medium.
    pub medium: Arc<dyn Medium>,
    /// One line: what it is, and what it is not.
    pub description: String,
    /// What lies under it that this run did not create, and that a write would therefore destroy.
    pub existing: Vec<Existing>,
    /// What can be changed about it, and about what it stands on, while it is open.
    pub handles: Vec<Handle>,
    /// The names by which devices are known that this one stands on, or is: those with a
    /// [`Medium::identity`], by their URIs; of volumes their UUIDs, which are unique in their pool, and
    /// of mirrors theirs.
    pub identities: Vec<(Uri, String)>,
}

/// A hand on an open device that can be changed while it is in use.
#[derive(Clone, Debug, PartialEq)]
pub enum Handle {
    /// How long answers are kept back.
    Delay {
        /// The device by its name.
        uri: String,
        /// The hand.
        handle: DelayHandle,
    },
    /// What goes wrong, and whether what hangs goes on hanging.
    Fault {
        /// The device by its name.
        uri: String,
        /// The hand.
        handle: FaultHandle,
    },
    /// How far the copying is. There is nothing to be changed about it.
    Mirror {
        /// The device by its name.
        uri: String,
        /// The hand.
        handle: MirrorHandle,
    },
}

impl Handle {
    /// The name of the device that it is on.
    pub fn uri(&self) -> &str {
        match self {
            Self::Delay { uri, .. } | Self::Fault { uri, .. } | Self::Mirror { uri, .. } => uri,
        }
    }
}

type Open = fn(&Opener<'_>, &Uri) -> Result<Opened, MediumError>;

/// The kinds of this floor.
const KINDS: &[(&str, Open)] = &[
    ("null", null::open),
    ("ram", ram::open),
    ("file", file::open),
    ("model", model::open),
    ("delay", delay::open),
    ("fault", fault::open),
    ("split", split::open),
    ("stripe", stripe::open),
    ("mirror", mirror::open),
    ("volume", store::open),
];

impl Opener<'_> {
    /// Opens the device that `uri` names, and what it stands on.
    ///
    /// # Errors
    ///
    /// If there is no such kind, the name says what the kind does not know, or the device cannot be
    /// had.
    pub fn open(&self, uri: &Uri) -> Result<Opened, MediumError> {
        let mut opened = self.open_kind(uri)?;
        let is_own = uri.children().is_empty() || uri.scheme() == store::Place::SCHEME;
        if is_own && let Some(name) = opened.medium.identity() {
            opened.identities.push((uri.clone(), name));
        }
        Ok(opened)
    }

    fn open_kind(&self, uri: &Uri) -> Result<Opened, MediumError> {
        let scheme = uri.scheme();
        if let Some((_, kind)) = self.more.iter().find(|(name, _)| *name == scheme) {
            return kind.open(self, uri);
        }
        match KINDS.iter().find(|(name, _)| *name == scheme) {
            Some((_, open)) => open(self, uri),
            None => {
                let ours: Vec<&str> = KINDS.iter().map(|(name, _)| *name).collect();
                let more = self.more.iter().map(|(name, _)| *name);
                let more = more.filter(|name| !ours.contains(name));
                let names = ours.iter().copied().chain(more);
                let names: Vec<String> = names.map(|name| format!("{name}:")).collect();
                let expected = names.join(", ");
                let text = format!("no devices of kind `{scheme}`, expected one of {expected}");
                Err(uri.refuse(text).into())
            }
        }
    }
}

impl Opened {
    /// A medium that was made just now, with nothing on it that could be lost.
    pub fn fresh(medium: Arc<dyn Medium>, description: impl Into<String>) -> Self {
        let (existing, handles, identities) = (Vec::new(), Vec::new(), Vec::new());
        Self { medium, description: description.into(), existing, handles, identities }
    }

    /// What stands on this: another medium, with all that is known of what lies below.
    #[must_use]
    pub fn under(self, medium: Arc<dyn Medium>, description: impl Into<String>) -> Self {
        Self { medium, description: description.into(), ..self }
    }

    /// This, with one more hand on it.
    #[must_use]
    pub fn with(mut self, handle: Handle) -> Self {
        self.handles.push(handle);
        self
    }
}

impl fmt::Debug for Opened {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { description, existing, .. } = self;
        out.debug_tuple("Opened").field(description).field(existing).finish()
    }
}

impl From<UriError> for MediumError {
    fn from(error: UriError) -> Self {
        Self::new(Blame::Caller, error.to_string())
    }
}

/// How many blocks of `block_size` there are in `size_bytes`.
pub(crate) fn block_count(uri: &Uri, size_bytes: u64, block_size: u32) -> Result<u64, UriError> {
    let block = u64::from(block_size);
    if size_bytes == 0 || !size_bytes.is_multiple_of(block) {
        return Err(uri.refuse(format!(
            "size is {size_bytes} bytes, expected a multiple of the block of {block} bytes"
        )));
    }
    Ok(size_bytes / block)
}

/// Bytes in a block, where a name does not say.
pub(crate) const BLOCK_DEFAULT: u32 = 512;

#[cfg(test)]
mod tests {
    use std::path::Path;

    use base::Blame;
    use dma::Regions;
    use host::Clock;

    use super::{Opened, Opener};
    use crate::MediumError;
    use crate::uri::Uri;

    fn open_in(regions: &Regions, uri: &str) -> Result<Opened, MediumError> {
        let opener = Opener { regions, clock: Clock::start(), seed: 1, more: &[] };
        opener.open(&uri.parse::<Uri>()?)
    }

    fn open(uri: &str) -> Result<Opened, MediumError> {
        open_in(&Regions::new(8), uri)
    }

    #[test]
    fn what_was_named_is_opened() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        let file = format!("file:{}?size=1m&block=4k&engine=threads", path.display());
        for (uri, block_size, blocks, said) in [
            ("null:", 512, 1 << 31, "null: no data moves"),
            ("null:?size=1m&block=4k", 4096, 256, "null: no data moves"),
            ("ram:1m", 512, 2048, "ram: nothing survives"),
            ("ram:?size=1m&block=1k", 1024, 1024, "ram: nothing survives"),
            (&file, 4096, 256, "by threads"),
            ("model:p4600?size=1m", 512, 2048, "a model of an Intel SSD DC P4600"),
            ("model:[ram:1m?block=4k]?device=p4800x", 4096, 256, "over ram"),
            ("delay:[ram:1m]?read=80us&read-p99=1ms", 512, 2048, "reads 80 us (p99 1 ms), writes"),
            ("fault:[ram:1m]", 512, 2048, "fault: none, on purpose; over ram"),
            ("fault:[ram:1m]?rule=hang:any;error:readx1", 512, 2048, "hang:any;error:readx1, on"),
            ("split:[ram:1m]?part=3&parts=4", 512, 512, "blocks 1536 to 2047 of ram"),
            ("split:[ram:1m]?offset=1k&size=4k", 512, 8, "blocks 2 to 9 of ram"),
            ("split:[ram:1m]?offset=1k", 512, 2046, "blocks 2 to 2047 of ram"),
            ("stripe:[ram:1m],[ram:65k]", 512, 256, "2 legs by 65536 bytes, nothing survives"),
        ] {
            let opened = open(uri).unwrap();
            let limits = opened.medium.limits();
            assert_eq!((limits.block_size, limits.block_count), (block_size, blocks), "{uri}");
            assert!(opened.description.contains(said), "{}", opened.description);
            assert!(opened.existing.is_empty(), "{uri} is new");
        }
        assert!(Path::new(&path).exists());
        let again = open(&format!("file:{}", path.display())).unwrap();
        let existing: Vec<String> = again.existing.iter().map(ToString::to_string).collect();
        assert_eq!(existing.len(), 1);
        assert!(existing[0].contains("disk"), "{existing:?}");
    }

    #[test]
    fn a_mistake_is_named_with_what_would_be_accepted() {
        for (uri, problem) in [
            ("tape:0", "no devices of kind `tape`, expected one of null:, ram:, "),
            ("null:x", "path is `x`, expected none: null:?size=1t"),
            ("null:?colour=red", "no parameter `colour`, expected block or size"),
            ("ram:", "the size is missing, expected ram:1g"),
            ("ram:1g?size=1g", "the size is given twice, expected once"),
            ("ram:1000", "size is 1000 bytes, expected a multiple of the block of 512 bytes"),
            ("ram:0", "size is 0 bytes, expected a multiple of the block of 512 bytes"),
            ("file:", "the file is missing, expected file:/path/to/it"),
            ("file:/x?direct=maybe", "direct is `maybe`, expected yes or no"),
            ("file:/x?engine=aio", "engine is `aio`, expected auto, io_uring or threads"),
            ("model:p9", "no model `p9`, expected p4600 or p4800x"),
            ("model:[ram:1m]", "device is missing, expected device=p4600 or p4800x"),
            ("model:[ram:1m],[ram:1m]?device=p4600", "stands on 2 devices, expected one"),
            ("delay:ram", "stands on 0 devices, expected one"),
            ("delay:[ram:1m]?read=2us&read-p99=1us", "read-p99 is 1 us, expected from the mean"),
            (
                "fault:[ram:1m]?rule=burn:read",
                "rule: `burn` is not an effect, expected one of error",
            ),
            ("split:[ram:1m]", "which part is not clear, expected part=0&parts=4 or offset=1m"),
            ("split:[ram:1m]?part=1", "part is `1`, expected a number from 0 to 0"),
            ("split:[ram:1m]?parts=4", "which part is not clear"),
            ("split:[ram:1m]?part=0&parts=4&size=1k", "which part is not clear"),
            ("split:[ram:1m]?part=4&parts=4", "part is `4`, expected a number from 0 to 3"),
            (
                "split:[ram:1m]?offset=1",
                "offset is 1 bytes, expected a multiple of the block of 512",
            ),
            ("split:[ram:1m]?size=2m", "split: 4096 blocks from 0 on, expected at least 1"),
            ("split:[ram:1m]?offset=1m", "split: 0 blocks from 2048 on, expected at least 1"),
            ("stripe:", "stands on nothing, expected its legs: stripe:[ram:1g],[ram:1g]"),
        ] {
            let error = open(uri).unwrap_err();
            let text = error.to_string();
            assert!(text.starts_with(&format!("{uri}: {problem}")), "{text}");
            assert_eq!(error.blame(), Blame::Caller);
        }
    }

    #[test]
    fn what_lies_below_is_known_above() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        let file = format!("file:{}?size=1m&engine=threads", path.display());
        open(&file).unwrap();
        let stack = format!("stripe:[delay:[{file}]?read=1us],[split:[delay:[ram:2m]]?offset=1m]");
        let opened = open(&stack).unwrap();
        assert_eq!(opened.existing.len(), 1, "{opened:?}");
        let uris: Vec<String> = opened.handles.iter().map(|handle| handle.uri().into()).collect();
        assert_eq!(uris, [format!("delay:[{file}]?read=1us"), "delay:[ram:2m]".into()]);
    }

    #[test]
    fn a_medium_that_cannot_be_opened_says_whose_move_it_is() {
        let missing = open("file:/no/such/directory/file?size=1m").unwrap_err();
        assert_eq!(missing.blame(), Blame::Caller);
        assert!(missing.to_string().contains("open /no/such/directory/file: "), "{missing}");
        let regions = Regions::new(1);
        let _first = open_in(&regions, "ram:4k").unwrap();
        let full = open_in(&regions, "ram:4k").unwrap_err();
        assert_eq!(full.blame(), Blame::Machine);
        assert!(full.to_string().contains("made for 1"), "{full}");
    }
}
