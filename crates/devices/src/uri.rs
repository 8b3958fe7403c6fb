//! Device URIs of the command line: emulated SSDs with their driver, or a device of the block layer.

mod emu;

use core::fmt;
use core::str::FromStr;

pub use self::emu::{COUNT_MAX, EmuMedium, EmuSpec, MODELS};
use crate::VFIO_USER_SCHEME;
use tenmil_base::Error;

/// Device URI, which may name several devices of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Uri {
    /// Emulated SSDs, accessed through the NVMe driver.
    Emu(EmuSpec),
    /// Any other block device.
    Block(tenmil_block::uri::Uri),
}

impl Uri {
    /// Number of devices named.
    pub fn count(&self) -> u32 {
        match self {
            Self::Emu(spec) => spec.count,
            Self::Block(_) => 1,
        }
    }

    /// The emulated SSDs, if it names any.
    pub fn emulated(&self) -> Option<&EmuSpec> {
        match self {
            Self::Emu(spec) => Some(spec),
            Self::Block(_) => None,
        }
    }

    /// Whether it includes a controller of another process, which maps the memory of requests.
    pub fn includes_other_process(&self) -> bool {
        match self {
            Self::Emu(_) => false,
            Self::Block(uri) => names_another_process(uri),
        }
    }

    /// Whether it includes an SSD without an IOMMU, which can access all memory.
    pub fn lacks_iommu(&self) -> bool {
        match self {
            Self::Emu(_) => false,
            Self::Block(uri) => crate::pcie::lacks_iommu(uri),
        }
    }

    /// Whether reads return the data written: no block lies on a device that discards data.
    pub fn keeps_data(&self) -> bool {
        match self {
            Self::Emu(spec) => spec.keeps_data(),
            Self::Block(uri) => keeps_data(uri),
        }
    }
}

fn names_another_process(uri: &tenmil_block::uri::Uri) -> bool {
    uri.scheme() == VFIO_USER_SCHEME || uri.children().iter().any(names_another_process)
}

fn keeps_data(uri: &tenmil_block::uri::Uri) -> bool {
    match uri.scheme() {
        "null" => false,
        EmuSpec::SCHEME => EmuSpec::from_uri(uri).is_ok_and(|spec| spec.keeps_data()),
        _ => uri.children().iter().all(keeps_data),
    }
}

impl FromStr for Uri {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let uri: tenmil_block::uri::Uri = text.parse()?;
        Ok(if uri.scheme() == EmuSpec::SCHEME {
            Self::Emu(EmuSpec::from_uri(&uri)?)
        } else {
            Self::Block(uri)
        })
    }
}

impl fmt::Display for Uri {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Emu(spec) => spec.fmt(out),
            Self::Block(uri) => uri.fmt(out),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Uri;

    fn parse(text: &str) -> Uri {
        text.parse().unwrap()
    }

    #[test]
    fn emulated_ssd_uri_has_its_count_and_other_uris_count_one() {
        assert_eq!(parse("emu:null?count=21").count(), 21);
        assert!(parse("emu:ram").emulated().is_some());
        for text in ["ram:1g", "mirror:[emu:ram],[emu:ram]", "tape:0"] {
            let uri = parse(text);
            assert!(uri.emulated().is_none() && uri.count() == 1, "{text}");
            assert_eq!(uri.to_string(), text);
        }
        let refused = "emu:tape".parse::<Uri>().unwrap_err();
        assert!(refused.text.starts_with("emu:tape: no medium `tape`, expected "), "{refused}");
    }

    #[test]
    fn controller_in_another_process_is_found_at_any_depth_of_the_uri() {
        for text in ["vfio-user:/x", "stripe:[ram:1m],[vfio-user:/x]"] {
            assert!(parse(text).includes_other_process(), "{text}");
        }
        assert!(!parse("emu:ram").includes_other_process());
        assert!(!parse("tcp://127.0.0.1:1/nqn").includes_other_process());
    }

    #[test]
    fn device_without_storage_keeps_no_data_at_any_depth_of_the_uri() {
        for text in ["null:", "emu:null", "delay:[null:]", "stripe:[ram:1m],[emu:null]"] {
            assert!(!parse(text).keeps_data(), "{text}");
        }
        for text in ["ram:1m", "emu:ram", "model:p4600", "stripe:[ram:1m],[file:/x]"] {
            assert!(parse(text).keeps_data(), "{text}");
        }
    }
}
