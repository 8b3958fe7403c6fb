//! Replacements for the devices of features that this build does not have: errors that name the feature.

use tenmil_base::{Error, ErrorCategory};
use tenmil_block::uri::Uri;
use tenmil_block::{OpenedDevice, Opener};

#[cfg(not(feature = "crypt"))]
pub(crate) fn open_crypt(_: &Opener<'_>, _: &Uri) -> Result<OpenedDevice, Error> {
    let text = "crypt: this program was built without a cipher, expected one that was built with \
                `cargo build --release --features crypt`, which needs a C compiler";
    Err(Error::new(ErrorCategory::Environment, text))
}

#[cfg(not(feature = "rbd"))]
pub(crate) fn open_rbd(_: &Opener<'_>, uri: &Uri) -> Result<OpenedDevice, Error> {
    let text = format!(
        "{uri}: this program was built without Ceph, expected the feature `rbd` of the crate `tenmil`"
    );
    Err(Error::new(ErrorCategory::Environment, text))
}

#[cfg(test)]
mod tests {
    use tenmil_block::Opener;

    fn refusal(uri: &str) -> String {
        let regions = tenmil_dma::RegionTable::new(1);
        let clock = tenmil_linux::Clock::start();
        let opener = Opener { regions: &regions, clock, seed: 1, kinds: crate::KINDS };
        opener.open(&uri.parse().unwrap()).unwrap_err().to_string()
    }

    #[test]
    #[cfg(not(feature = "crypt"))]
    fn missing_cipher_error_names_the_build_option() {
        let refused = refusal("crypt:[ram:1m]?key-file=/x");
        assert!(refused.contains("--features crypt"), "{refused}");
    }

    #[test]
    #[cfg(not(feature = "rbd"))]
    fn missing_ceph_error_names_the_feature() {
        let refused = refusal("rbd:pool/image");
        assert!(refused.contains("the feature `rbd`"), "{refused}");
    }
}
