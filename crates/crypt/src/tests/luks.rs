//! Interoperability with `qemu-img`: LUKS images, whose payload is `aes-xts-plain64`. The key is
//! extracted from their header here, for the tests only.

#![expect(unsafe_code, reason = "the library speaks C")]

use std::path::Path;
use std::process::Command;

use aws_lc_sys::{EVP_sha256, PKCS5_PBKDF2_HMAC, SHA256};
use tenmil_base::{IoChannel, IoStatus, Operation};

use super::{CryptFixture, key_from_bytes, write_key_file};
use crate::cipher::{CipherDirection, XtsCipher};

const PASSPHRASE: &str = "a passphrase";

/// LUKS1 header, as specified; all numbers are big-endian.
struct Luks1Header<'a>(&'a [u8]);

impl Luks1Header<'_> {
    fn be32_at(&self, at: usize) -> u32 {
        u32::from_be_bytes(self.0[at..at + 4].try_into().unwrap())
    }

    fn payload_offset_bytes(&self) -> u64 {
        u64::from(self.be32_at(104)) * 512
    }

    /// Payload key, from the passphrase and the first key slot.
    fn key(&self) -> Vec<u8> {
        assert_eq!(&self.0[..8], b"LUKS\xba\xbe\0\x01");
        assert_eq!(&self.0[8..12], b"aes\0");
        assert_eq!(&self.0[40..52], b"xts-plain64\0");
        assert_eq!((&self.0[72..79], self.be32_at(108)), (&b"sha256\0"[..], 64));
        let slot = 208;
        assert_eq!(self.be32_at(slot), 0x00ac_71f3, "the slot is in use");
        let salt = &self.0[slot + 8..slot + 40];
        let slot_key = pbkdf2_hmac_sha256(PASSPHRASE.as_bytes(), salt, self.be32_at(slot + 4), 64);
        let at = self.be32_at(slot + 40) as usize * 512;
        let stripes = self.be32_at(slot + 44) as usize;
        let mut split = self.0[at..at + 64 * stripes].to_vec();
        assert!(
            XtsCipher::new(&key_from_bytes(&slot_key), CipherDirection::Decrypt)
                .unwrap()
                .apply_to_units(0, &mut split)
        );
        let found = merge_anti_forensic_stripes(&split);
        let digest = pbkdf2_hmac_sha256(&found, &self.0[132..164], self.be32_at(164), 20);
        assert_eq!(digest, self.0[112..132], "it is the key that the header was made with");
        found
    }
}

/// PBKDF2 with HMAC-SHA-256.
fn pbkdf2_hmac_sha256(secret: &[u8], salt: &[u8], iterations: u32, len: usize) -> Vec<u8> {
    let mut key = vec![0; len];
    // SAFETY: the call has no premises; the result is static.
    let digest = unsafe { EVP_sha256() };
    let (secret_at, salt_at) = (secret.as_ptr().cast(), salt.as_ptr());
    // SAFETY: each pointer is passed with the length of its slice, and `key` has room for the `len`
    // bytes that are written.
    let done = unsafe {
        let (secret_len, salt_len, into) = (secret.len(), salt.len(), key.as_mut_ptr());
        PKCS5_PBKDF2_HMAC(secret_at, secret_len, salt_at, salt_len, iterations, digest, len, into)
    };
    assert_eq!(done, 1);
    key
}

fn sha256(bytes: &[u8]) -> [u8; 32] {
    let mut digest = [0; 32];
    // SAFETY: the slice has the given length, and SHA-256 writes 32 bytes.
    let done = unsafe { SHA256(bytes.as_ptr(), bytes.len(), digest.as_mut_ptr()) };
    assert!(!done.is_null());
    digest
}

/// Reverses the anti-forensic split: a key is spread over many stripes, all of which are needed.
fn merge_anti_forensic_stripes(split: &[u8]) -> Vec<u8> {
    let mut merged = vec![0; 64];
    let last = split.len() / 64 - 1;
    for (index, stripe) in split.chunks(64).enumerate() {
        merged.iter_mut().zip(stripe).for_each(|(byte, other)| *byte ^= other);
        if index < last {
            merged = (0_u32..)
                .zip(merged.chunks(32))
                .flat_map(|(number, part)| sha256(&[&number.to_be_bytes(), part].concat()))
                .collect();
        }
    }
    merged
}

/// Runs a tool. `qemu-img` benchmarks the machine to choose its iteration count and fails if the
/// clock of a busy machine did not advance; then it is run again.
fn run_tool(tool: &str, arguments: &[&str]) {
    for time_limit in (0..20).rev() {
        let output = Command::new(tool).args(arguments).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        let problem = String::from_utf8_lossy(&output.stderr);
        if output.status.success() {
            return;
        }
        let unlucky = problem.contains("Unable to get accurate CPU usage") && time_limit > 0;
        assert!(unlucky, "{tool} {arguments:?}: {said} {problem}");
    }
}

/// Runs `qemu-io` commands on the device inside an image.
fn run_qemu_io(path: &Path, commands: &[&str]) {
    let secret = format!("secret,id=s0,data={PASSPHRASE}");
    let image = format!("driver=luks,key-secret=s0,file.filename={}", path.display());
    let mut arguments = vec!["--object", &secret, "--image-opts", &image];
    commands.iter().for_each(|command| arguments.extend(["-c", command]));
    run_tool("qemu-io", &arguments);
}

fn has_tools() -> bool {
    let is_there = |tool: &str| Command::new(tool).arg("--version").output().is_ok();
    let Some(missing) = ["qemu-img", "qemu-io"].into_iter().find(|tool| !is_there(tool)) else {
        return true;
    };
    assert!(std::env::var_os("TENMIL_REQUIRE_TOOLS").is_none(), "{missing} is missing");
    println!("skipped: there is no {missing}");
    false
}

#[test]
fn luks_image_of_qemu_is_read_and_written() {
    if !has_tools() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    let secret = format!("secret,id=s0,data={PASSPHRASE}");
    let options = "key-secret=s0,cipher-alg=aes-256,cipher-mode=xts,ivgen-alg=plain64,\
                   hash-alg=sha256,iter-time=10";
    let name = path.display().to_string();
    run_tool(
        "qemu-img",
        &["create", "--object", &secret, "-f", "luks", "-o", options, &name, "1M"],
    );
    run_qemu_io(&path, &["write -P 0x5a 0 64k", "write -P 0xa7 700k 1536"]);

    #[expect(clippy::disallowed_methods, reason = "a test may")]
    let image = std::fs::read(&path).unwrap();
    let header = Luks1Header(&image);
    let (_directory, key) = write_key_file(&header.key(), 0o600);
    let payload = header.payload_offset_bytes();
    let below = format!("split:[file:{name}?engine=threads]?offset={payload}");
    let bench = CryptFixture::new();
    let medium = bench.open(&format!("crypt:[{below}]?key-file={key}")).unwrap().medium;
    assert_eq!(medium.limits().block_count, 2048, "the payload and nothing else");
    let mut channel = medium.channel().unwrap();
    let mut transfer = |operation, lba, blocks: u32, byte: u8| {
        let segment = bench.memory.slice(0, blocks * 512).unwrap();
        let expected = vec![byte; segment.len_bytes as usize];
        let fill = if operation == Operation::Write { byte } else { !byte };
        bench.write_segments(&[segment], &vec![fill; expected.len()]);
        let status = bench.run_request(
            &mut *channel as &mut dyn IoChannel,
            operation,
            lba,
            blocks,
            &[segment],
        );
        assert_eq!(status, IoStatus::SUCCESS);
        assert!(bench.read_segments(&[segment]) == expected, "{operation:?} at {lba}");
    };
    transfer(Operation::Read, 0, 128, 0x5a);
    transfer(Operation::Read, 1400, 3, 0xa7);
    transfer(Operation::Write, 127, 5, 0x33);
    transfer(Operation::Write, 2047, 1, 0x44);
    drop(channel);
    drop(medium);
    let reads = ["read -P 0x5a 0 65024", "read -P 0x33 65024 2560", "read -P 0x44 1048064 512"];
    run_qemu_io(&path, &reads);
}
