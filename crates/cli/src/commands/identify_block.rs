//! Identify result of a block device, from the opened device alone.

use core::fmt::Write;

use serde_json::{Value, json};
use tenmil_base::{BlockDevice, Error, ExtentKind, Limits, Operation};
use tenmil_block::overwrite::OverwriteReport;
use tenmil_block::uri::Uri;
use tenmil_block::{OpenedDevice, Opener};
use tenmil_dma::RegionTable;
use tenmil_linux::Clock;
use tenmil_linux::kernel_files::KernelFiles;

use super::LOOKING_KINDS;
use tenmil_base::text::format_size;

/// Properties of a block device.
#[derive(Clone, Debug)]
pub(super) struct BlockDeviceInfo {
    uri: String,
    description: String,
    limits: Limits,
    channels_max: u32,
    existing: Vec<String>,
    extents: ExtentTotals,
}

/// Bytes by what the extents hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct ExtentTotals {
    data: u64,
    zeroes: u64,
    holes: u64,
    /// Number of extents.
    count: u64,
    /// Bytes not examined because there were too many extents.
    rest: u64,
}

/// Maximum number of extents examined.
const EXTENTS_MAX: u64 = 1 << 20;

/// Capacity of the DMA region table.
const REGIONS_MAX: usize = 4095;

/// Opens the device of `uri` and reads its properties.
///
/// # Errors
///
/// If it cannot be opened, or its extents cannot be read.
pub(super) fn identify_block_device(uri: &Uri) -> Result<BlockDeviceInfo, Error> {
    let regions = RegionTable::new(REGIONS_MAX);
    let opener = Opener { regions: &regions, clock: Clock::start(), seed: 1, kinds: LOOKING_KINDS };
    let OpenedDevice { medium, description, existing, .. } = open_or_open_read_only(&opener, uri)?;
    let machine = KernelFiles::live_system();
    let existing =
        existing.iter().map(|one| OverwriteReport::probe_existing_data(one, &machine).to_string());
    let extents = ExtentTotals::from_device(&*medium)
        .map_err(|found| Error::environment(format!("{uri:#}: look for data: {found}")))?;
    Ok(BlockDeviceInfo {
        uri: uri.to_string(),
        description,
        limits: medium.limits(),
        channels_max: medium.channels_max(),
        existing: existing.collect(),
        extents,
    })
}

/// Opens the device read-write, or read-only if it is in use.
fn open_or_open_read_only(opener: &Opener<'_>, uri: &Uri) -> Result<OpenedDevice, Error> {
    opener.open(uri).or_else(|refused| {
        let looked_at = opener.open(&uri.clone().read_only());
        looked_at.map_err(|_| refused.clone()).map(|mut opened| {
            opened.description += &format!(", for reading only: {refused}");
            opened
        })
    })
}

impl ExtentTotals {
    fn from_device(medium: &dyn BlockDevice) -> Result<Self, String> {
        let limits = medium.limits();
        let block_size = u64::from(limits.block_size);
        let (mut extents, mut lba) = (Self::default(), 0);
        while lba < limits.block_count && extents.count < EXTENTS_MAX {
            let extent = medium.block_status(lba).map_err(|error| error.to_string())?;
            if extent.blocks == 0 {
                return Err(format!("an extent of no blocks at block {lba}, expected some"));
            }
            let bytes = match extent.kind {
                ExtentKind::Data => &mut extents.data,
                ExtentKind::Zeroes => &mut extents.zeroes,
                ExtentKind::Hole => &mut extents.holes,
            };
            *bytes += extent.blocks * block_size;
            extents.count += 1;
            lba += extent.blocks;
        }
        extents.rest = limits.block_count.saturating_sub(lba) * block_size;
        Ok(extents)
    }
}

impl BlockDeviceInfo {
    fn operations(&self) -> Vec<&'static str> {
        let all = Operation::ALL.into_iter();
        let there = all.filter(|operation| self.limits.operations.has(*operation));
        there.map(Operation::name).collect()
    }

    fn size_bytes(&self) -> u64 {
        self.limits.block_count.saturating_mul(u64::from(self.limits.block_size))
    }

    /// All properties as text.
    pub(super) fn text(&self) -> String {
        let Limits { block_size, block_count, .. } = self.limits;
        let blocks = |count: u32| match count {
            0 => "none".into(),
            count => format!("{count} blocks"),
        };
        let channels = match self.channels_max {
            u32::MAX => "unlimited".into(),
            count => count.to_string(),
        };
        let size = self.size_bytes();
        let mut rows = vec![
            ("description", self.description.clone()),
            ("size", format!("{size} bytes ({}), {block_count} blocks", format_size(size))),
            ("block", format!("{block_size} bytes")),
            ("metadata", format!("{} bytes for each block", self.limits.metadata_size)),
            ("durability", self.limits.durability.describe().into()),
            ("operations", self.operations().join(", ")),
            ("largest request", blocks(self.limits.request_blocks_max)),
            ("segments in a request", self.limits.segments_max.to_string()),
            ("optimal boundary", blocks(self.limits.optimal_boundary_blocks)),
            ("atomic write", blocks(self.limits.atomic_write_blocks)),
            ("requests in flight", format!("{} on a channel", self.limits.depth_max)),
            ("channels", channels),
            ("contents", self.extents.text()),
        ];
        rows.extend(self.existing.iter().map(|there| ("existing data", there.clone())));
        let mut text = format!("{}\n", self.uri);
        for (name, value) in rows {
            let _ = writeln!(text, "  {name:<22}{value}");
        }
        text
    }

    /// All properties as one JSON object, with a trailing newline.
    pub(super) fn json(&self) -> String {
        let Limits { block_size, block_count, metadata_size, .. } = self.limits;
        let ExtentTotals { data, zeroes, holes, count, rest } = self.extents;
        let channels = (self.channels_max != u32::MAX).then_some(self.channels_max);
        let document: Value = json!({
            "uri": self.uri,
            "description": self.description,
            "size_bytes": self.size_bytes(),
            "block_size": block_size,
            "block_count": block_count,
            "metadata_size": metadata_size,
            "durability": self.limits.durability.describe(),
            "operations": self.operations(),
            "request_blocks_max": self.limits.request_blocks_max,
            "segments_max": self.limits.segments_max,
            "optimal_boundary_blocks": self.limits.optimal_boundary_blocks,
            "atomic_write_blocks": self.limits.atomic_write_blocks,
            "depth_max": self.limits.depth_max,
            "channels_max": channels,
            "extents": {
                "count": count,
                "data_bytes": data,
                "zero_bytes": zeroes,
                "hole_bytes": holes,
                "unexamined_bytes": rest,
            },
            "existing": self.existing,
        });
        format!("{document:#}\n")
    }
}

impl ExtentTotals {
    fn text(&self) -> String {
        let kinds = [(self.data, "data"), (self.zeroes, "zeroes"), (self.holes, "holes")];
        let kinds = kinds.iter().filter(|(bytes, _)| *bytes > 0);
        let mut parts: Vec<String> =
            kinds.map(|(bytes, kind)| format!("{} of {kind}", format_size(*bytes))).collect();
        if self.rest > 0 {
            parts.push(format!("{} not examined", format_size(self.rest)));
        }
        let plural = if self.count == 1 { "" } else { "s" };
        format!("{}, in {} extent{plural}", parts.join(", "), self.count)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;
    use tenmil_block::Opener;
    use tenmil_dma::RegionTable;
    use tenmil_linux::Clock;

    use super::identify_block_device;

    fn identify(uri: &str) -> (String, Value) {
        let device = identify_block_device(&uri.parse().unwrap()).unwrap();
        (device.text(), serde_json::from_str(&device.json()).unwrap())
    }

    #[test]
    fn memory_device_is_identified() {
        let (text, json) = identify("ram:1m?block=4k");
        assert!(text.starts_with("ram:1m?block=4k\n  description           ram: "), "{text}");
        assert!(text.contains("1048576 bytes (1 MiB), 256 blocks"), "{text}");
        assert!(text.contains("unlimited") && text.contains("1 MiB of holes"), "{text}");
        assert_eq!((&json["block_size"], &json["block_count"]), (&4096.into(), &256.into()));
        assert_eq!(json["durability"], "volatile, lost when the process exits");
        assert_eq!(json["channels_max"], Value::Null);
        assert_eq!(json["extents"]["hole_bytes"], 1 << 20);
        assert_eq!(json["operations"][0], "read");
    }

    #[test]
    fn file_identify_shows_its_data_extents_not_created_by_this_run() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        let uri = format!("file:{}?size=1m&block=4k&engine=threads", path.display());
        let (_, json) = identify(&uri);
        assert_eq!(json["existing"].as_array().unwrap().len(), 0, "made just now");
        let (text, json) = identify(&format!("file:{}?engine=threads", path.display()));
        assert!(text.contains("existing data") && text.contains("1048576 bytes"), "{text}");
        assert_eq!(json["existing"].as_array().unwrap().len(), 1);
        assert!(text.contains("nothing but zeroes at both ends"), "{text}");
    }

    #[test]
    fn file_in_use_is_identified_read_only() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        let uri = format!("file:{}?engine=threads", path.display());
        identify(&format!("{uri}&size=1m"));
        let (regions, clock) = (RegionTable::new(8), Clock::start());
        let opener = Opener { regions: &regions, clock, seed: 1, kinds: tenmil_drivers::KINDS };
        let reader = opener.open(&format!("{uri}&read-only=yes").parse().unwrap()).unwrap();
        let (text, json) = identify(&uri);
        assert!(text.contains(", for reading only: file: lock "), "{text}");
        assert_eq!(json["block_count"], 2048);
        drop(reader);
        let _writer = opener.open(&uri.parse().unwrap()).unwrap();
        let refused = identify_block_device(&uri.parse().unwrap()).unwrap_err();
        assert!(refused.text.contains("not open elsewhere"), "{refused}");
    }

    #[test]
    fn unopenable_device_is_rejected() {
        let refused = identify_block_device(&"tape:0".parse().unwrap()).unwrap_err();
        assert!(refused.text.starts_with("tape:0: no devices of kind `tape`"), "{refused}");
    }
}
