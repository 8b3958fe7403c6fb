//! `emu:` URIs of emulated SSDs.
//!
//! ```text
//!   emu:null?count=21            21 emulated SSDs that complete commands without moving data
//!   emu:ram?size=1g&block=4k     one that stores its blocks in memory
//!   emu:file:/tmp/disk?size=1g   one that stores its blocks in a file
//!   emu:model:p4600              one with the modeled latency of a real SSD
//!   emu:null?doorbell-cost=250        one with a doorbell cost of 250 ns, as over PCIe (modeled)
//! ```

use core::fmt;
use core::str::FromStr;

use tenmil_block::quantity_parser::{parse_count, parse_size};
use tenmil_block::uri::{Uri, UriError};

use tenmil_base::Error;

/// Parameters of a set of equal emulated SSDs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EmuSpec {
    /// Backing of the namespaces.
    pub medium: EmuMedium,
    /// Number of SSDs.
    pub count: u32,
    /// Size of each in bytes; zero means the size of the file.
    pub size_bytes: u64,
    /// Logical block size in bytes: 512, 1024, 2048 or 4096.
    pub block_size: u32,
    /// Maximum queue size in entries (CAP.MQES + 1). A queue holds one command less than its size.
    pub entries: u32,
    /// I/O queue pairs per controller.
    pub queues: u16,
    /// Time that a doorbell write takes on the submitting core, in nanoseconds: a model of a PCIe
    /// posted write. Zero means the unmodified store to memory.
    pub doorbell_ns: u32,
}

/// Backing of an emulated namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EmuMedium {
    /// Completes commands without moving data.
    Null,
    /// Memory.
    Ram,
    /// A file.
    File {
        /// Path of the file.
        path: String,
    },
    /// Memory with the timing model of a real SSD.
    Model {
        /// One of [`MODELS`].
        name: String,
    },
}

/// Timing models and their descriptions.
pub const MODELS: [(&str, &str); 2] = [
    ("p4600", "a model of an Intel P4600: NAND flash, 512-byte sectors, about 80 us to read 4 KiB"),
    ("p4800x", "a model of an Intel P4800X: 3D XPoint, about 9 us to read 4 KiB"),
];

/// Maximum number of emulated SSDs per URI.
pub const COUNT_MAX: u32 = 256;

/// Maximum modeled cost of a doorbell write, in nanoseconds.
const DOORBELL_NS_MAX: u32 = 10_000;

const KINDS: &str = "emu:null, emu:ram, emu:file:PATH, emu:model:p4600 or emu:model:p4800x";
const ENTRIES_DEFAULT: u32 = 1024;
const QUEUES_DEFAULT: u16 = 64;
const NULL_SIZE: u64 = 1 << 40;
const RAM_SIZE: u64 = 64 << 20;
const MODEL_SIZE: u64 = 1 << 30;

impl EmuSpec {
    /// URI scheme.
    pub const SCHEME: &str = "emu";

    /// Creates the parameters of one SSD over `medium`, with defaults.
    pub fn new(medium: EmuMedium) -> Self {
        let size_bytes = match medium {
            EmuMedium::Null => NULL_SIZE,
            EmuMedium::Ram => RAM_SIZE,
            EmuMedium::File { .. } => 0,
            EmuMedium::Model { .. } => MODEL_SIZE,
        };
        let (entries, queues) = (ENTRIES_DEFAULT, QUEUES_DEFAULT);
        Self { medium, count: 1, size_bytes, block_size: 512, entries, queues, doorbell_ns: 0 }
    }

    /// Parses the parameters of `uri`, whose scheme is [`SCHEME`](Self::SCHEME).
    ///
    /// # Errors
    ///
    /// If a parameter is unknown or invalid.
    pub fn from_uri(uri: &Uri) -> Result<Self, UriError> {
        let mut spec = Self::new(medium_of(uri)?);
        let mut fields = uri.options();
        let mut take = |key: &'static str| fields.text_value(key).map(|text| (key, text));
        let values =
            ["count", "size", "block", "queue-size", "queues", "doorbell-cost"].map(&mut take);
        fields.reject_unconsumed()?;
        for (key, value) in values.into_iter().flatten() {
            let refuse =
                |expected: String| uri.error(format!("{key} is `{value}`, expected {expected}"));
            spec.set(key, &value).map_err(refuse)?;
        }
        spec.check(uri)?;
        Ok(spec)
    }

    /// Maximum number of commands in flight per queue pair.
    pub fn depth_max(&self) -> u32 {
        self.entries - 1
    }

    /// Size of each SSD in bytes, if it is known before the SSD is opened.
    pub fn size_bytes_known(&self) -> Option<u64> {
        (self.size_bytes != 0).then_some(self.size_bytes)
    }

    /// Whether reads return the data written.
    pub fn keeps_data(&self) -> bool {
        self.medium != EmuMedium::Null
    }

    /// Whether all blocks are in the memory of this process.
    pub fn is_in_memory(&self) -> bool {
        matches!(self.medium, EmuMedium::Ram | EmuMedium::Model { .. })
    }

    /// Sets the parameter `key`; the error names the expected values.
    fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        let count = || parse_count(value).ok();
        let size = || parse_size(value).ok();
        match key {
            "count" => match count().and_then(|count| u32::try_from(count).ok()) {
                Some(count @ 1..=COUNT_MAX) => self.count = count,
                _ => return Err(format!("1 to {COUNT_MAX}")),
            },
            "size" => match size() {
                Some(size @ 4096..) if size <= 1 << 50 => self.size_bytes = size,
                _ => return Err("4k to 1024t, such as 64m or 1g".into()),
            },
            "block" => match size() {
                Some(512) => self.block_size = 512,
                Some(1024) => self.block_size = 1024,
                Some(2048) => self.block_size = 2048,
                Some(4096) => self.block_size = 4096,
                _ => return Err("512, 1k, 2k or 4k".into()),
            },
            "queue-size" => match count().and_then(|count| u32::try_from(count).ok()) {
                Some(entries @ 2..=65_536) => self.entries = entries,
                _ => return Err("2 to 65536".into()),
            },
            "doorbell-cost" => match count().and_then(|count| u32::try_from(count).ok()) {
                Some(ns @ 0..=DOORBELL_NS_MAX) => self.doorbell_ns = ns,
                _ => return Err(format!("0 to {DOORBELL_NS_MAX} nanoseconds")),
            },
            _ => match count().and_then(|count| u16::try_from(count).ok()) {
                Some(queues @ 1..=1024) => self.queues = queues,
                _ => return Err("1 to 1024".into()),
            },
        }
        Ok(())
    }

    fn check(&self, uri: &Uri) -> Result<(), UriError> {
        if matches!(self.medium, EmuMedium::File { .. }) && self.count > 1 {
            let count = self.count;
            return Err(uri.error(format!("count is {count}, expected 1: one file is one SSD")));
        }
        if !self.size_bytes.is_multiple_of(u64::from(self.block_size)) {
            return Err(uri.error(format!(
                "size is {} bytes, expected a multiple of the block of {} bytes",
                self.size_bytes, self.block_size
            )));
        }
        Ok(())
    }
}

impl FromStr for EmuSpec {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let uri: Uri = text.parse()?;
        if uri.scheme() != Self::SCHEME {
            let scheme = uri.scheme();
            let text = format!("no emulated SSDs of kind `{scheme}`, expected {KINDS}");
            return Err(uri.error(text).into());
        }
        Ok(Self::from_uri(&uri)?)
    }
}

fn medium_of(uri: &Uri) -> Result<EmuMedium, UriError> {
    let medium = uri.path();
    match medium.split_once(':').unwrap_or((medium, "")) {
        ("null", "") => Ok(EmuMedium::Null),
        ("ram", "") => Ok(EmuMedium::Ram),
        ("file", "") => Err(uri.error("the file is missing, expected emu:file:PATH")),
        ("file", path) => Ok(EmuMedium::File { path: path.into() }),
        ("model", name) if MODELS.iter().any(|(known, _)| *known == name) => {
            Ok(EmuMedium::Model { name: name.into() })
        }
        ("model", name) => {
            let names = MODELS.map(|(known, _)| known).join(" or ");
            Err(uri.error(format!("no model `{name}`, expected {names}")))
        }
        _ => Err(uri.error(format!("no medium `{medium}`, expected {KINDS}"))),
    }
}

impl fmt::Display for EmuSpec {
    /// Formats the shortest equivalent URI.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut uri = Uri::new(Self::SCHEME, self.medium.to_string());
        let usual = Self::new(self.medium.clone());
        let parameters = [
            ("count", u64::from(self.count), u64::from(usual.count)),
            ("size", self.size_bytes, usual.size_bytes),
            ("block", u64::from(self.block_size), u64::from(usual.block_size)),
            ("queue-size", u64::from(self.entries), u64::from(usual.entries)),
            ("queues", u64::from(self.queues), u64::from(usual.queues)),
            ("doorbell-cost", u64::from(self.doorbell_ns), 0),
        ];
        for (key, value, _) in parameters.into_iter().filter(|(_, value, usual)| value != usual) {
            uri = uri.with_option(
                key,
                match key {
                    "size" | "block" => short_size(value),
                    _ => value.to_string(),
                },
            );
        }
        uri.fmt(out)
    }
}

impl fmt::Display for EmuMedium {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => out.write_str("null"),
            Self::Ram => out.write_str("ram"),
            Self::File { path } => write!(out, "file:{path}"),
            Self::Model { name } => write!(out, "model:{name}"),
        }
    }
}

/// A size in the shortest exact notation: `4k`, `1g`, `513`.
fn short_size(bytes: u64) -> String {
    let units = [(40, "t"), (30, "g"), (20, "m"), (10, "k")];
    let whole = units.iter().find(|(shift, _)| bytes != 0 && bytes.is_multiple_of(1 << shift));
    match whole {
        Some((shift, unit)) => format!("{}{unit}", bytes >> shift),
        None => bytes.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::{EmuMedium, EmuSpec};

    fn refusal(uri: &str) -> String {
        uri.parse::<EmuSpec>().unwrap_err().text
    }

    #[test]
    fn uri_is_parsed_and_formatted_in_its_shortest_form() {
        let uri = "emu:ram?count=3&size=1048576&block=4096&queue-size=1024";
        let spec: EmuSpec = uri.parse().unwrap();
        let expected = EmuSpec {
            count: 3,
            size_bytes: 1 << 20,
            block_size: 4096,
            ..EmuSpec::new(EmuMedium::Ram)
        };
        assert_eq!(spec, expected);
        assert_eq!(spec.to_string(), "emu:ram?count=3&size=1m&block=4k");
        for uri in [
            "emu:null",
            "emu:null?count=21",
            "emu:file:/tmp/a:b",
            "emu:model:p4800x",
            "emu:null?doorbell-cost=250",
        ] {
            assert_eq!(uri.parse::<EmuSpec>().unwrap().to_string(), uri);
        }
    }

    #[test]
    fn every_error_names_the_value_and_the_accepted_values() {
        let kinds = "expected emu:null, emu:ram, emu:file:PATH, emu:model:p4600 or \
                     emu:model:p4800x";
        let not_one = "null: no such file or directory, expected KIND:… such as ram:1g";
        assert!(refusal("null").starts_with(not_one));
        assert_eq!(refusal("ram:1g"), format!("ram:1g: no emulated SSDs of kind `ram`, {kinds}"));
        assert_eq!(refusal("emu:tape"), format!("emu:tape: no medium `tape`, {kinds}"));
        assert_eq!(refusal("emu:null:x"), format!("emu:null:x: no medium `null:x`, {kinds}"));
        assert_eq!(
            refusal("emu:model:p1"),
            "emu:model:p1: no model `p1`, expected p4600 or p4800x"
        );
        assert_eq!(
            refusal("emu:null?count=0"),
            "emu:null?count=0: count is `0`, expected 1 to 256"
        );
        assert_eq!(
            refusal("emu:null?count"),
            "emu:null?count: `count` is not a parameter, expected KEY=VALUE"
        );
        assert_eq!(
            refusal("emu:null?colour=1"),
            "emu:null?colour=1: no parameter `colour`, expected count, size, block, queue-size, \
             queues or doorbell-cost"
        );
        assert_eq!(
            refusal("emu:null?block=513"),
            "emu:null?block=513: block is `513`, expected 512, 1k, 2k or 4k"
        );
        assert_eq!(
            refusal("emu:ram?size=4097"),
            "emu:ram?size=4097: size is 4097 bytes, expected a multiple of the block of 512 bytes"
        );
        assert_eq!(
            refusal("emu:ram?size=1m&size=2m"),
            "emu:ram?size=1m&size=2m: size is given twice, expected once"
        );
        assert_eq!(
            refusal("emu:file:/a?count=2"),
            "emu:file:/a?count=2: count is 2, expected 1: one file is one SSD"
        );
        assert_eq!(refusal("emu:file"), "emu:file: the file is missing, expected emu:file:PATH");
        assert_eq!(
            refusal("emu:null?queue-size=1"),
            "emu:null?queue-size=1: queue-size is `1`, expected 2 to 65536"
        );
        assert_eq!(
            refusal("emu:null?queues=1025"),
            "emu:null?queues=1025: queues is `1025`, expected 1 to 1024"
        );
        assert_eq!(
            refusal("emu:null?doorbell-cost=10001"),
            "emu:null?doorbell-cost=10001: doorbell-cost is `10001`, expected 0 to 10000 nanoseconds"
        );
        assert_eq!(
            refusal("emu:null?size=1"),
            "emu:null?size=1: size is `1`, expected 4k to 1024t, such as 64m or 1g"
        );
    }
}
