//! Hosts that send arbitrary commands, generated from printed seeds.

use tenmil_base::Random;
use tenmil_wire::{AdminOpcode, Command, IoOpcode};

use crate::controller::fuzz_admin_commands;

/// Random numbers that are likely to have a meaning.
fn plausible_number(random: &mut Random) -> u32 {
    let wide = u32::try_from(random.below(1 << 32)).unwrap();
    match random.below(6) {
        0 => 0,
        1 => wide & 7,
        2 => wide & 0xff,
        3 => u32::MAX - (wide & 3),
        4 => 1 << (wide & 31),
        _ => wide,
    }
}

/// A command, mostly with a valid opcode.
fn random_command(random: &mut Random) -> Command {
    let draw = usize::try_from(random.below(1 << 20)).unwrap();
    let is_io = random.chance(1, 5);
    let opcode = match random.below(20) {
        0 => draw.to_le_bytes()[0],
        _ if is_io => IoOpcode::ALL[draw % IoOpcode::ALL.len()].code(),
        _ => AdminOpcode::ALL[draw % AdminOpcode::ALL.len()].code(),
    };
    let action = if is_io { 7 } else { 16 + (plausible_number(random) & 0x2f) };
    Command::new(opcode)
        .with_nsid(plausible_number(random))
        .with_cdw3(if random.chance(1, 40) { plausible_number(random) } else { action })
        .with_mptr(plausible_number(random).into())
        .with_cdw10(plausible_number(random))
        .with_cdw11(plausible_number(random))
        .with_cdw12(plausible_number(random))
        .with_cdw13(if random.chance(1, 2) { 0 } else { plausible_number(random) })
        .with_cdw14(if random.chance(1, 2) { 0 } else { plausible_number(random) })
        .with_cdw15(plausible_number(random))
}

#[test]
fn random_command_sequences_do_not_panic() {
    for seed in 0..200 {
        println!("seed {seed}");
        let mut random = Random::new(seed);
        let mut bytes = Vec::new();
        for _ in 0..500 {
            bytes.extend(random_command(&mut random).to_bytes());
        }
        fuzz_admin_commands(&bytes);
    }
}

#[test]
fn random_bytes_do_not_panic() {
    for seed in 0..50 {
        println!("seed {seed}");
        let mut random = Random::new(seed);
        let bytes: Vec<u8> = (0..8192).flat_map(|_| random.next_u64().to_le_bytes()).collect();
        fuzz_admin_commands(&bytes);
    }
    fuzz_admin_commands(&[]);
    fuzz_admin_commands(&[0xff; 63]);
}
