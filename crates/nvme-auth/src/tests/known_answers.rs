//! Vectors of others: Linux (`drivers/nvme/common/tests/auth_kunit.c`), libnvme
//! (`libnvme/test/psk.c`), RFC 4231, and the primes that RFC 7919 prints.

use super::hex;
use crate::response::Transcript;
use crate::tls_psk::PskKind;
use crate::{
    Concatenation, ConfiguredPsk, Derivation, Group, Hash, IdentityVersion, SecretBytes,
    TlsPskError, generated_tls_psk, tls_psk, tls_psk_candidates,
};

const PSK32: &str = "5512DBB6737D0106F65975B773DFB011FFC344BCF442E2DD6D8BC4870B5D5B03";
const PSK48: &str = "5512DBB6737D0106F65975B773DFB011FFC344BCF442E2DD6D8BC4870B5D5B03\
                     FFC344BCF442E2DD6D8BC4870B5D5B03";
const TEXT_00: &str = "NVMeTLSkey-1:00:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:";
const TEXT_01: &str = "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:";
const TEXT_02: &str = "NVMeTLSkey-1:02:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwP/w0S89ELi3W2LxIcL\
                       XVsDn8kXZQ==:";

/// `auth_kunit.c`: PSK and TLS PSK from a session key and two challenges.
#[test]
fn generated_psk_and_its_tls_psk_are_those_of_linux() {
    let key: Vec<u8> = (b'A'..).take(64).collect();
    let c1: Vec<u8> = (0..64).collect();
    let c2: Vec<u8> = (0..64).map(|index| 0xff - index).collect();
    for (hash, psk, digest, tls_key) in [
        (
            Hash::Sha256,
            "1733c59fa7f48fcf37f5f26fc4ff0268ad4f78e030f4f3b0bfd1d47e7bb1447a",
            "OldoKuTfKddMuyCznAZojkWD7P4D9/AtzDzLimtOxqI=",
            "3c17da628474a04d2247c4cab47968c915388193f7c071bd9489cc3666cd7cc8",
        ),
        (
            Hash::Sha384,
            "f14b2dd3234c459694d3bc63f8968bd6b37c2c6de849e22e118749001ce4bbe8\
             640b9e3a748cb11ce4b1d71d359cce39",
            "cffMWk8TSS7HOQebjgYEIkrPrjWPV4JE5cdPB8WhEvY4JBW5YynKyv66XscN4A9n",
            "2774753233537b3fa50eb7d16a8e43457d85f4906c005b2236616c5d80939d08\
             98fff15bb8b77119d2be0aac423e7590",
        ),
        (
            Hash::Sha512,
            "9c9f089a618b47d2d75f4b6c28070424487b445dd96e70c4c09b55e8b6000152\
             a3363c3454043f38f0b85036ded40655350aa87b8b6a282b5c1acae16233dd5b",
            "",
            "",
        ),
    ] {
        let len = hash.len_bytes();
        let transcript = Transcript {
            hash,
            transaction: 0,
            concatenation: Concatenation::NewTlsPsk,
            session_key: Some(SecretBytes::new(key[..len].to_vec())),
        };
        let generated = transcript.generated_psk(&c1[..len], &c2[..len]).unwrap();
        assert_eq!(generated.expose(), hex(psk), "{hash}");
        let tls = generated_tls_psk(&generated, hash, IdentityVersion::One, "hostnqn", "subsysnqn");
        if hash == Hash::Sha512 {
            assert_eq!(tls, Err(TlsPskError::NoCipherSuite(hash)));
            continue;
        }
        let tls = tls.unwrap();
        assert_eq!(tls.identity, format!("NVMe1G{:02} hostnqn subsysnqn {digest}", hash.id()));
        assert_eq!(tls.key.expose(), hex(tls_key), "{hash}");
        assert_eq!((tls.kind, tls.hash), (PskKind::Generated, hash));
    }
}

/// `psk.c`: the interchange format.
#[test]
fn interchange_format_is_that_of_libnvme() {
    for (text, id, psk) in [(TEXT_00, 0, PSK32), (TEXT_01, 1, PSK32), (TEXT_02, 2, PSK48)] {
        let key = ConfiguredPsk::parse(text).unwrap();
        assert_eq!(key.transform().id(), id);
        assert_eq!(key.to_text().as_str(), text);
        let again = ConfiguredPsk::generate(key.transform(), SecretBytes::new(hex(psk))).unwrap();
        assert_eq!(again, key);
    }
}

/// `psk.c`: identities of both derivations.
#[test]
fn identities_are_those_of_libnvme() {
    let (host, subsystem) = ("nqn.psk-test-host", "nqn.psk-test-subsys");
    let compat = Derivation::LibnvmeBefore115;
    for (text, derivation, hash, digest) in [
        (TEXT_01, Derivation::Specification, "01", "iSbjiStwJ/1TrTvDlt2fjFmzvsytOJelidNnA+X5lEU="),
        (
            TEXT_02,
            Derivation::Specification,
            "02",
            "QhW2+Rp6RzHlNtCslyRxMnwJ11tKKhz8JCAQpQ+XUD8f9td1VeH5h53yz2wKJG1a",
        ),
        (TEXT_01, compat, "01", "66GuqV08TsAGII39teWUfwQwizjv06Jy8jOcX3NAAzM="),
        (TEXT_02, compat, "02", "RsKmYJ3nAn1ApjjMloJFbAkLPivONDAX/xW327YBUsn2eGShXSjCZvBaOxscLqmz"),
    ] {
        let key = ConfiguredPsk::parse(text).unwrap();
        let psk = tls_psk(&key, IdentityVersion::One, derivation, host, subsystem).unwrap();
        assert_eq!(psk.identity, format!("NVMe1R{hash} {host} {subsystem} {digest}"));
        let psk = tls_psk(&key, IdentityVersion::Zero, derivation, host, subsystem).unwrap();
        assert_eq!(psk.identity, format!("NVMe0R{hash} {host} {subsystem}"));
    }
}

/// The order is that of Linux, `nvme_tls_psk_prio` in `drivers/nvme/common/keyring.c`.
#[test]
fn candidates_are_in_the_order_of_linux() {
    let keys = [TEXT_01, TEXT_02, TEXT_00].map(|text| ConfiguredPsk::parse(text).unwrap());
    let candidates = tls_psk_candidates(&keys, "h", "s");
    let order: Vec<_> = candidates.iter().map(|psk| &psk.identity[..8]).collect();
    let runs = [("NVMe1R02", 2), ("NVMe1R01", 4), ("NVMe0R02", 2), ("NVMe0R01", 4)];
    let expected: Vec<_> =
        runs.into_iter().flat_map(|(prefix, count)| core::iter::repeat_n(prefix, count)).collect();
    assert_eq!(order, expected);
    assert!(candidates[..2].is_sorted_by_key(|psk| psk.derivation));
    let distinct: std::collections::BTreeSet<_> =
        candidates.iter().map(|psk| psk.key.expose()).collect();
    assert_eq!(distinct.len(), candidates.len());
}

/// A context of HKDF-Expand-Label has at most 255 bytes, and two NQNs of 223 have more.
#[test]
fn version_0_identity_is_limited_to_255_bytes() {
    let key = ConfiguredPsk::parse(TEXT_01).unwrap();
    let make = |version, derivation, len: usize| {
        tls_psk(&key, version, derivation, "h", &"s".repeat(len)).map(|psk| psk.identity.len())
    };
    let zero = IdentityVersion::Zero;
    let overhead = "NVMe0R01 h ".len();
    assert_eq!(make(zero, Derivation::Specification, 255 - overhead), Ok(255));
    assert_eq!(
        make(zero, Derivation::Specification, 256 - overhead),
        Err(TlsPskError::IdentityTooLong { found_bytes: 256 })
    );
    assert!(make(zero, Derivation::LibnvmeBefore115, 256 - overhead).is_ok());
    assert!(make(IdentityVersion::One, Derivation::Specification, 256).is_ok());
    let long = tls_psk_candidates(&[key], &"h".repeat(223), &"s".repeat(223));
    let versions: Vec<_> = long.iter().map(|psk| (psk.version, psk.derivation)).collect();
    assert_eq!(
        versions,
        [
            (IdentityVersion::One, Derivation::Specification),
            (IdentityVersion::One, Derivation::LibnvmeBefore115),
            (zero, Derivation::LibnvmeBefore115),
        ]
    );
}

/// RFC 4231, test case 2.
#[test]
fn hmac_is_that_of_rfc_4231() {
    for (hash, mac) in [
        (Hash::Sha256, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"),
        (
            Hash::Sha384,
            "af45d2e376484031617f78d2b58a6b1b9c7ef464f5a01b47e42ec3736322445e\
             8e2240ca5e69e2c78b3239ecfab21649",
        ),
        (
            Hash::Sha512,
            "164b7a7bfcf819e2e395fbe73b56e0a387bd64222e831fd610270cd7ea250554\
             9758bf75c05a994a6d034f65f8f0e6fdcaeab1a34d4a6b4b636e070a38bce737",
        ),
    ] {
        let found = hash.hmac(b"Jefe", &[b"what do ya ", b"want for nothing?"]);
        assert_eq!(found.expose(), hex(mac), "{hash}");
    }
}

/// RFC 7919 appendix A: what all primes begin with, and what each ends with.
#[test]
fn primes_begin_and_end_as_rfc_7919_prints_them() {
    let start = hex("FFFFFFFF FFFFFFFF ADF85458 A2BB4A9A AFDC5620 273D3CF1");
    for (group, end) in [
        (Group::Ffdhe2048, "886B4238 61285C97 FFFFFFFF FFFFFFFF"),
        (Group::Ffdhe3072, "66C62E37 FFFFFFFF FFFFFFFF"),
        (Group::Ffdhe4096, "5E655F6A FFFFFFFF FFFFFFFF"),
        (Group::Ffdhe6144, "D0E40E65 FFFFFFFF FFFFFFFF"),
        (Group::Ffdhe8192, "C5C6424C FFFFFFFF FFFFFFFF"),
    ] {
        let prime = group.prime();
        assert_eq!(prime.len(), group.len_bytes());
        assert!(prime.starts_with(&start), "{group}");
        assert!(prime.ends_with(&hex(end)), "{group}: {:02x?}", &prime[prime.len() - 16..]);
    }
    assert!(Group::Null.prime().is_empty());
}
