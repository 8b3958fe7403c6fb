//! What `crypt:` says in a program without a cipher.

use base::Blame;
use block::uri::Uri;
use block::{MediumError, Opened, Opener};

/// Refuses, and says how to get one.
pub(crate) fn open(_: &Opener<'_>, _: &Uri) -> Result<Opened, MediumError> {
    let text = "crypt: this program was built without a cipher, expected one that was built with \
                `cargo build --release --features crypt`, which needs a C compiler";
    Err(MediumError::new(Blame::Machine, text))
}

#[cfg(test)]
mod tests {
    use block::Opener;

    #[test]
    fn a_program_without_a_cipher_says_how_to_get_one() {
        let regions = dma::Regions::new(1);
        let clock = host::Clock::start();
        let opener = Opener { regions: &regions, clock, seed: 1, more: crate::KINDS };
        let uri = "crypt:[ram:1m]?key-file=/x".parse().unwrap();
        let refused = opener.open(&uri).unwrap_err().to_string();
        assert!(refused.contains("--features crypt"), "{refused}");
    }
}
