//! Opens a device stack from its URI.

use std::fmt;
use std::sync::Arc;

use tenmil_base::{BlockDevice, ErrorCategory};
use tenmil_dma::RegionTable;
use tenmil_linux::Clock;

use crate::devices::{delay, fault, file, mirror, model, null, pool, ram, split, stripe};
use crate::mirror::MirrorMonitor;
use crate::uri::{Uri, UriError};
use crate::{DelayControl, ExistingData, FaultControl};
use tenmil_base::Error;

/// Context that every device of a run is opened with. Stacked devices open their children with the same.
pub struct Opener<'a> {
    /// The table that resolves the segments of every request. A device registers regions in it: one for
    /// its own memory, and one or two for each of its channels.
    pub regions: &'a RegionTable,
    /// The clock of devices that run threads of their own.
    pub clock: Clock,
    /// The seed of all randomness, unless a URI sets its own.
    pub seed: u64,
    /// Device types of upper layers. One with the name of a built-in type replaces it.
    pub more: &'a [(&'a str, &'a dyn DeviceType)],
}

/// A device type: opens the devices of one URI scheme.
pub trait DeviceType: Sync {
    /// Opens the device that `uri` names.
    ///
    /// # Errors
    ///
    /// If the URI has an option that this type does not know, or the device cannot be opened.
    fn open(&self, opener: &Opener<'_>, uri: &Uri) -> Result<OpenedDevice, Error>;
}

impl<F: Sync> DeviceType for F
where
    F: Fn(&Opener<'_>, &Uri) -> Result<OpenedDevice, Error>,
{
    fn open(&self, opener: &Opener<'_>, uri: &Uri) -> Result<OpenedDevice, Error> {
        self(opener, uri)
    }
}

/// An open block device with its description.
#[derive(Clone)]
pub struct OpenedDevice {
    /// The block device.
    pub medium: Arc<dyn BlockDevice>,
    /// One line for the user: what the device is, and its limitations.
    pub description: String,
    /// Existing data below this device that this run did not create and that a write would destroy.
    pub existing: Vec<ExistingData>,
    /// Run-time controls of this device and of the devices below it.
    pub handles: Vec<DeviceControl>,
    /// Unique names of this device and of the devices below it, by their URIs: the [`BlockDevice::identity`]
    /// of a device, the UUID of a volume (unique in its pool) and the UUID of a mirror.
    pub identities: Vec<(Uri, String)>,
}

/// Run-time control of an open device.
#[derive(Clone, Debug, PartialEq)]
pub enum DeviceControl {
    /// Changes the latencies of a [`Delay`](crate::Delay).
    Delay {
        /// The URI of the device.
        uri: String,
        /// The control.
        handle: DelayControl,
    },
    /// Changes the rules of a [`Fault`](crate::Fault) and completes hanging requests.
    Fault {
        /// The URI of the device.
        uri: String,
        /// The control.
        handle: FaultControl,
    },
    /// Reports resync progress of a [`Mirror`](crate::Mirror); read-only.
    Mirror {
        /// The URI of the device.
        uri: String,
        /// The monitor.
        handle: MirrorMonitor,
    },
}

impl DeviceControl {
    /// The URI of the controlled device.
    pub fn uri(&self) -> &str {
        match self {
            Self::Delay { uri, .. } | Self::Fault { uri, .. } | Self::Mirror { uri, .. } => uri,
        }
    }
}

type Open = fn(&Opener<'_>, &Uri) -> Result<OpenedDevice, Error>;

/// The built-in device types.
const DEVICE_TYPES: &[(&str, Open)] = &[
    ("null", null::open),
    ("ram", ram::open),
    ("file", file::open),
    ("model", model::open),
    ("delay", delay::open),
    ("fault", fault::open),
    ("split", split::open),
    ("stripe", stripe::open),
    ("mirror", mirror::open),
    ("volume", pool::open),
];

impl Opener<'_> {
    /// Opens the device that `uri` names and the devices below it.
    ///
    /// # Errors
    ///
    /// If the scheme is unknown, the URI has an option that its type does not know, or the device cannot
    /// be opened.
    pub fn open(&self, uri: &Uri) -> Result<OpenedDevice, Error> {
        let mut opened = self.open_kind(uri)?;
        let is_own = uri.children().is_empty() || uri.scheme() == pool::VolumeRef::SCHEME;
        if is_own && let Some(name) = opened.medium.identity() {
            opened.identities.push((uri.clone(), name));
        }
        Ok(opened)
    }

    fn open_kind(&self, uri: &Uri) -> Result<OpenedDevice, Error> {
        let scheme = uri.scheme();
        if let Some((_, kind)) = self.more.iter().find(|(name, _)| *name == scheme) {
            return kind.open(self, uri);
        }
        match DEVICE_TYPES.iter().find(|(name, _)| *name == scheme) {
            Some((_, open)) => open(self, uri),
            None => {
                let ours: Vec<&str> = DEVICE_TYPES.iter().map(|(name, _)| *name).collect();
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

impl OpenedDevice {
    /// A newly created device without existing data.
    pub fn fresh(medium: Arc<dyn BlockDevice>, description: impl Into<String>) -> Self {
        let (existing, handles, identities) = (Vec::new(), Vec::new(), Vec::new());
        Self { medium, description: description.into(), existing, handles, identities }
    }

    /// Replaces the block device by one stacked on it, and keeps the data, controls and identities below.
    #[must_use]
    pub fn under(self, medium: Arc<dyn BlockDevice>, description: impl Into<String>) -> Self {
        Self { medium, description: description.into(), ..self }
    }

    /// Adds a run-time control.
    #[must_use]
    pub fn with(mut self, handle: DeviceControl) -> Self {
        self.handles.push(handle);
        self
    }
}

impl fmt::Debug for OpenedDevice {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { description, existing, .. } = self;
        out.debug_tuple("Opened").field(description).field(existing).finish()
    }
}

impl From<UriError> for Error {
    fn from(error: UriError) -> Self {
        Self::new(ErrorCategory::Usage, error.to_string())
    }
}

/// The number of blocks of `block_size` in `size_bytes`.
pub(crate) fn block_count(uri: &Uri, size_bytes: u64, block_size: u32) -> Result<u64, UriError> {
    let block = u64::from(block_size);
    if size_bytes == 0 || !size_bytes.is_multiple_of(block) {
        return Err(uri.refuse(format!(
            "size is {size_bytes} bytes, expected a multiple of the block of {block} bytes"
        )));
    }
    Ok(size_bytes / block)
}

/// Block size in bytes if the URI does not set one.
pub(crate) const BLOCK_DEFAULT: u32 = 512;

#[cfg(test)]
mod tests {
    use std::path::Path;

    use tenmil_base::ErrorCategory;
    use tenmil_dma::RegionTable;
    use tenmil_linux::Clock;

    use super::{OpenedDevice, Opener};
    use crate::uri::Uri;
    use tenmil_base::Error;

    fn open_in(regions: &RegionTable, uri: &str) -> Result<OpenedDevice, Error> {
        let opener = Opener { regions, clock: Clock::start(), seed: 1, more: &[] };
        opener.open(&uri.parse::<Uri>()?)
    }

    fn open(uri: &str) -> Result<OpenedDevice, Error> {
        open_in(&RegionTable::new(8), uri)
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
            assert_eq!(error.category(), ErrorCategory::Usage);
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
        assert_eq!(missing.category(), ErrorCategory::Usage);
        assert!(missing.to_string().contains("open /no/such/directory/file: "), "{missing}");
        let regions = RegionTable::new(1);
        let _first = open_in(&regions, "ram:4k").unwrap();
        let full = open_in(&regions, "ram:4k").unwrap_err();
        assert_eq!(full.category(), ErrorCategory::Environment);
        assert!(full.to_string().contains("made for 1"), "{full}");
    }
}
