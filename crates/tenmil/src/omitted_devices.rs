//! Replacement for `crypt:` in builds without the cipher.

use tenmil_base::Error;
use tenmil_base::ErrorCategory;
use tenmil_block::uri::Uri;
use tenmil_block::{OpenedDevice, Opener};

/// Returns an error that names the build with the cipher.
pub(crate) fn open(_: &Opener<'_>, _: &Uri) -> Result<OpenedDevice, Error> {
    let text = "crypt: this program was built without a cipher, expected one that was built with \
                `cargo build --release --features crypt`, which needs a C compiler";
    Err(Error::new(ErrorCategory::Environment, text))
}

#[cfg(test)]
mod tests {
    use tenmil_block::Opener;

    #[test]
    fn missing_cipher_error_names_the_build_option() {
        let regions = tenmil_dma::RegionTable::new(1);
        let clock = tenmil_linux::Clock::start();
        let opener = Opener { regions: &regions, clock, seed: 1, kinds: crate::KINDS };
        let uri = "crypt:[ram:1m]?key-file=/x".parse().unwrap();
        let refused = opener.open(&uri).unwrap_err().to_string();
        assert!(refused.contains("--features crypt"), "{refused}");
    }
}
