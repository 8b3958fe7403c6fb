//! How a program names media: `emu:MEDIUM?KEY=VALUE&…`.
//!
//! | medium | keys |
//! |---|---|
//! | `null`, `ram` | `size`, `block` |
//! | `file` | `path`, `size`, `block`, `direct=on\|off`, `engine=auto\|io_uring\|threads` |
//! | `model:NAME` | `over=null\|ram\|file`, `seed`, and the keys of what it is over |
//!
//! `emu:` in front adds `count`: so many SSDs, each with a medium of its own. A file then lies at
//! `path.0`, `path.1` and so on. Sizes are bytes, or a number and KiB, MiB, GiB or TiB. In a path,
//! `%26` is an ampersand and `%25` a per cent sign.

mod query;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use base::{Blame, Medium};
use dma::Regions;
use host::engine::Choice;

use self::query::Query;
use crate::{FileMedium, FileMediumOptions, MediumError, Model, Null, PROFILES, Profile, Ram};

/// So many emulated SSDs, all alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EmulatedUri {
    /// How many.
    pub count: u32,
    /// What each keeps its blocks in.
    pub medium: MediumSpec,
}

/// One medium, as it was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MediumSpec {
    /// Which device's timing to imitate, if any.
    pub model: Option<&'static Profile>,
    /// Where the blocks are.
    pub kind: Kind,
    /// Bytes in a block.
    pub block_size: u32,
    /// Bytes on the medium. `None` only for a file that is taken as it is.
    pub size_bytes: Option<u64>,
    /// What a model draws its latencies from; SSD number `n` has this plus `n`.
    pub seed: u64,
}

/// Where blocks are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Nowhere.
    Null,
    /// In memory.
    Ram,
    /// In a file.
    File {
        /// Where it lies.
        path: PathBuf,
        /// Whether to go round the page cache.
        direct: bool,
        /// How to talk to the kernel.
        engine: Choice,
    },
}

/// Text that names no medium: which part of it, what that is, and what would be accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UriError {
    uri: String,
    problem: String,
}

/// An opened medium, and what to tell people about it.
#[derive(Clone)]
pub struct Opened {
    /// The medium.
    pub medium: Arc<dyn Medium>,
    /// One line: what it is, and what it is not.
    pub description: String,
}

/// The size of a medium that has none of its own.
const SIZE_DEFAULT: u64 = 1 << 30;
const BLOCK_DEFAULT: u64 = 4096;
const COUNT_MAX: u64 = 1024;
const SCHEME: &str = "emu:";
const MEDIA: &str = "null, ram, file or model:NAME";

impl EmulatedUri {
    /// Reads `emu:MEDIUM?KEY=VALUE&…`.
    pub fn parse(uri: &str) -> Result<Self, UriError> {
        let refuse = |problem| UriError { uri: uri.into(), problem };
        let rest = uri.strip_prefix(SCHEME).ok_or_else(|| {
            let scheme = uri.split_once(':').map_or(uri, |(scheme, _)| scheme);
            refuse(format!("scheme is '{scheme}', expected emu, as in emu:null?count=4"))
        })?;
        let (name, mut query) = split(rest).map_err(refuse)?;
        let count = query.number("count", 1, 1, COUNT_MAX).map_err(refuse)?;
        let medium = MediumSpec::read(name, &mut query).map_err(refuse)?;
        query.finish().map_err(refuse)?;
        Ok(Self { count: u32::try_from(count).unwrap_or(1), medium })
    }

    /// Opens the medium of SSD number `index`.
    pub fn open(&self, regions: &Regions, index: u32) -> Result<Opened, MediumError> {
        let mut medium = self.medium.clone();
        medium.seed = medium.seed.wrapping_add(u64::from(index));
        if let Kind::File { path, .. } = &mut medium.kind
            && self.count > 1
        {
            path.as_mut_os_string().push(format!(".{index}"));
        }
        medium.open(regions)
    }
}

impl MediumSpec {
    /// Reads `MEDIUM?KEY=VALUE&…`.
    pub fn parse(text: &str) -> Result<Self, UriError> {
        let refuse = |problem| UriError { uri: text.into(), problem };
        let (name, mut query) = split(text).map_err(refuse)?;
        let medium = Self::read(name, &mut query).map_err(refuse)?;
        query.finish().map_err(refuse)?;
        Ok(medium)
    }

    fn read(name: &str, query: &mut Query) -> Result<Self, String> {
        let model = name.strip_prefix("model:").map(profile).transpose()?;
        let (name, seed) = match model {
            Some(_) => (query.text("over").unwrap_or("null".into()), query.seed()?),
            None => (name.into(), 0),
        };
        let kind = match name.as_str() {
            "null" => Kind::Null,
            "ram" => Kind::Ram,
            "file" => file(query)?,
            _ if model.is_some() => {
                return Err(format!("over is '{name}', expected null, ram or file"));
            }
            _ => return Err(format!("medium is '{name}', expected {MEDIA}")),
        };
        let block_size = query.number("block", BLOCK_DEFAULT, 512, 65_536)?;
        if !block_size.is_power_of_two() {
            return Err(format!("block is {block_size}, expected a power of two"));
        }
        let size_bytes = match (query.size("size")?, &kind, model) {
            (None, Kind::File { .. }, _) => None,
            (None, Kind::Null, Some(profile)) => Some(profile.capacity_bytes),
            (size, _, _) => Some(size.unwrap_or(SIZE_DEFAULT)),
        };
        match size_bytes.map(|size| (size, size % block_size)) {
            Some((size, rest)) if size == 0 || rest != 0 => {
                let accepted = format!("a multiple of the block of {block_size} bytes");
                return Err(format!("size is {size} bytes, expected {accepted}"));
            }
            _ => {}
        }
        let block_size = u32::try_from(block_size).unwrap_or(u32::MAX);
        Ok(Self { model, kind, block_size, size_bytes, seed })
    }

    /// How many places in the table of regions the medium takes when it has so many channels.
    pub fn regions(&self, channels: usize) -> usize {
        match self.kind {
            Kind::Null => 0,
            Kind::Ram => 1,
            Kind::File { .. } => 1 + channels,
        }
    }

    /// Opens the medium. It takes [`regions`](Self::regions) places in the table.
    pub fn open(&self, regions: &Regions) -> Result<Opened, MediumError> {
        let block_count = self.size_bytes.unwrap_or(0) / u64::from(self.block_size);
        let (medium, description): (Arc<dyn Medium>, String) = match &self.kind {
            Kind::Null => {
                let null = Null::new(self.block_size, block_count)?;
                (Arc::new(null), "null: no data moves".into())
            }
            Kind::Ram => {
                let ram = Ram::new(regions, self.block_size, block_count)?;
                (Arc::new(ram), "ram: nothing survives".into())
            }
            Kind::File { path, direct, engine } => {
                let file = FileMedium::open(
                    regions,
                    &FileMediumOptions {
                        path: path.clone(),
                        size_bytes: self.size_bytes,
                        block_size: self.block_size,
                        direct: *direct,
                        engine: *engine,
                    },
                )?;
                let description = file.describe();
                (Arc::new(file), description)
            }
        };
        let Some(profile) = self.model else { return Ok(Opened { medium, description }) };
        let model = Model::new(medium, profile, self.seed);
        let description = format!("{}; over {description}", profile.describe());
        Ok(Opened { medium: Arc::new(model), description })
    }
}

/// Reads a number of bytes: plain, or with a binary unit. Powers of ten are refused rather than
/// guessed at. `None` if it is no such thing.
pub fn parse_size(text: &str) -> Option<u64> {
    const UNITS: [(&str, u32); 4] = [("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40)];
    let unit = UNITS.iter().find_map(|(unit, shift)| Some((text.strip_suffix(unit)?, *shift)));
    let (digits, shift) = unit.unwrap_or((text, 0));
    let plain = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    digits.parse::<u64>().ok().filter(|_| plain)?.checked_mul(1 << shift)
}

/// Cuts `MEDIUM?QUERY`.
fn split(text: &str) -> Result<(&str, Query), String> {
    let (name, query) = text.split_once('?').unwrap_or((text, ""));
    Ok((name, Query::parse(query)?))
}

fn profile(name: &str) -> Result<&'static Profile, String> {
    Profile::named(name).ok_or_else(|| {
        let names: Vec<&str> = PROFILES.iter().map(|profile| profile.name).collect();
        format!("model is '{name}', expected {}", names.join(" or "))
    })
}

fn file(query: &mut Query) -> Result<Kind, String> {
    let path = query.text("path").filter(|path| !path.is_empty());
    let path = path.ok_or("path is missing, expected path=FILE for a file medium")?;
    let direct = query.choice("direct", &[("on", true), ("off", false)])?.unwrap_or(true);
    let engines =
        [("auto", Choice::Best), ("io_uring", Choice::Ring), ("threads", Choice::Threads)];
    let engine = query.choice("engine", &engines)?.unwrap_or_default();
    Ok(Kind::File { path: path.into(), direct, engine })
}

impl UriError {
    /// Always the caller's move.
    pub const fn blame(&self) -> Blame {
        Blame::Caller
    }
}

impl fmt::Display for UriError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}: {}", self.uri, self.problem)
    }
}

impl std::error::Error for UriError {}

impl fmt::Debug for Opened {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_tuple("Opened").field(&self.description).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use base::Blame;
    use dma::Regions;
    use host::engine::Choice;

    use super::{EmulatedUri, Kind, MediumSpec, parse_size};

    #[test]
    fn what_is_not_said_has_a_default() {
        let uri = EmulatedUri::parse("emu:null").unwrap();
        assert_eq!((uri.count, &uri.medium.kind), (1, &Kind::Null));
        assert_eq!((uri.medium.block_size, uri.medium.size_bytes), (4096, Some(1 << 30)));
        let model = MediumSpec::parse("model:p4600").unwrap();
        assert_eq!(model.size_bytes, model.model.map(|profile| profile.capacity_bytes));
        let over = MediumSpec::parse("model:p4600?over=ram").unwrap();
        assert_eq!((over.kind, over.size_bytes), (Kind::Ram, Some(1 << 30)));
    }

    #[test]
    fn every_key_says_what_it_says() {
        let uri = EmulatedUri::parse("emu:ram?count=21&size=64MiB&block=512").unwrap();
        assert_eq!((uri.count, uri.medium.block_size), (21, 512));
        assert_eq!(uri.medium.size_bytes, Some(64 << 20));

        let text = "model:p4800x?over=file&path=/a%26b%25&engine=threads&direct=off&seed=0x2a";
        let spec = MediumSpec::parse(text).unwrap();
        assert_eq!((spec.model.map(|profile| profile.name), spec.seed), (Some("p4800x"), 42));
        let (path, engine) = ("/a&b%".into(), Choice::Threads);
        assert_eq!(spec.kind, Kind::File { path, direct: false, engine });
        assert_eq!(spec.size_bytes, None);
    }

    #[test]
    fn a_mistake_is_named_with_what_would_be_accepted() {
        for (uri, problem) in [
            ("null", "scheme is 'null', expected emu, as in emu:null?count=4"),
            ("pcie:01", "scheme is 'pcie', expected emu, as in emu:null?count=4"),
            ("emu:", "medium is '', expected null, ram, file or model:NAME"),
            ("emu:flash", "medium is 'flash', expected null, ram, file or model:NAME"),
            ("emu:model:p9", "model is 'p9', expected p4600 or p4800x"),
            ("emu:model:p4600?over=tape", "over is 'tape', expected null, ram or file"),
            ("emu:null?count=0", "count is '0', expected a number from 1 to 1024"),
            ("emu:null?count=-1", "count is '-1', expected a number from 1 to 1024"),
            ("emu:null?count=1025", "count is '1025', expected a number from 1 to 1024"),
            (
                "emu:null?size=1GB",
                "size is '1GB', expected bytes, or a number and KiB, MiB, GiB or TiB",
            ),
            (
                "emu:null?size=5000",
                "size is 5000 bytes, expected a multiple of the block of 4096 bytes",
            ),
            ("emu:null?size=0", "size is 0 bytes, expected a multiple of the block of 4096 bytes"),
            ("emu:null?block=513", "block is 513, expected a power of two"),
            ("emu:null?block=256", "block is '256', expected a number from 512 to 65536"),
            ("emu:null?colour=red", "no key 'colour', expected count, block or size"),
            ("emu:null?path=/x", "no key 'path', expected count, block or size"),
            ("emu:null?size", "'size' has no value, expected KEY=VALUE"),
            ("emu:null?size=1&size=2", "size is given twice, expected once"),
            ("emu:file", "path is missing, expected path=FILE for a file medium"),
            ("emu:file?path=", "path is missing, expected path=FILE for a file medium"),
            ("emu:file?path=/x&direct=yes", "direct is 'yes', expected on or off"),
            ("emu:file?path=/x&engine=aio", "engine is 'aio', expected auto, io_uring or threads"),
            (
                "emu:file?path=%2",
                "path is '%2', expected two hexadecimal digits after a per cent sign",
            ),
            ("emu:model:p4600?seed=x", "seed is 'x', expected a number"),
        ] {
            let error = EmulatedUri::parse(uri).unwrap_err();
            assert_eq!(error.to_string(), format!("{uri}: {problem}"));
            assert_eq!(error.blame(), Blame::Caller);
        }
    }

    #[test]
    fn sizes_are_bytes_or_binary_units() {
        for (text, size) in [
            ("0", Some(0)),
            ("512", Some(512)),
            ("4KiB", Some(4096)),
            ("1TiB", Some(1 << 40)),
            ("16777215TiB", Some(16_777_215 << 40)),
            ("16777216TiB", None),
            ("", None),
            ("KiB", None),
            ("+1KiB", None),
            ("1 KiB", None),
            ("1kib", None),
            ("1.5GiB", None),
        ] {
            assert_eq!(parse_size(text), size, "{text}");
        }
    }

    #[test]
    fn what_was_named_is_opened() {
        let regions = Regions::new(8);
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("ssd");
        let file = format!("emu:file?path={}&size=1MiB&count=2&engine=threads", path.display());
        for (uri, blocks, said) in [
            ("emu:null", 1 << 18, "null: no data moves"),
            ("emu:ram?size=1MiB", 256, "ram: nothing survives"),
            (&file, 256, "by threads"),
            ("emu:model:p4600?over=ram&size=1MiB", 256, "a model of an Intel SSD DC P4600"),
        ] {
            let opened = EmulatedUri::parse(uri).unwrap().open(&regions, 1).unwrap();
            assert_eq!(opened.medium.limits().block_count, blocks, "{uri}");
            assert!(opened.description.contains(said), "{}", opened.description);
        }
        assert!(Path::new(&format!("{}.1", path.display())).exists());
        assert!(!path.exists());
    }

    #[test]
    fn a_table_of_as_many_regions_as_are_asked_for_is_enough() {
        let directory = tempfile::tempdir().unwrap();
        let file = format!("file?path={}&size=1MiB", directory.path().join("ssd").display());
        for text in ["null", "ram?size=1MiB", &file, "model:p4800x?over=ram&size=1MiB"] {
            let spec = MediumSpec::parse(text).unwrap();
            let open = |places| {
                let regions = Regions::new(places);
                let medium = spec.open(&regions).map_err(|error| error.to_string())?.medium;
                let channels = [medium.channel()?, medium.channel()?];
                Ok::<_, String>(channels.len())
            };
            let enough = spec.regions(2);
            assert_eq!(open(enough), Ok(2), "{text}");
            assert!(enough == 0 || open(enough - 1).is_err(), "{text}: {enough} is too many");
        }
    }

    #[test]
    fn a_medium_that_cannot_be_opened_says_whose_move_it_is() {
        let regions = Regions::new(1);
        let open = |uri| EmulatedUri::parse(uri).unwrap().open(&regions, 0).unwrap_err();
        let missing = open("emu:file?path=/no/such/directory/file&size=1MiB");
        assert_eq!(missing.blame(), Blame::Caller);
        assert!(missing.to_string().starts_with("file: open /no/such/directory/file: "));
        EmulatedUri::parse("emu:ram?size=4KiB").unwrap().open(&regions, 0).unwrap();
        let full = open("emu:ram?size=4KiB");
        assert_eq!(full.blame(), Blame::Machine);
        assert!(full.to_string().contains("made for 1"), "{full}");
    }
}
