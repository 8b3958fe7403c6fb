//! Writes one block and reads it back: the smallest complete program.

use std::error::Error;

use smol::block_on;
use tenmil::aio::{Claim, Opener};
use tenmil_linux::{Clock, CpuList};
use tenmil_reactor::{ReactorOptions, Reactors, ThreadBuilder};

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    // One reactor thread per core. Reactors poll while there is work and sleep otherwise.
    let clock = Clock::start();
    let reactors = Reactors::start(&CpuList::allowed(), &ReactorOptions::default(), &clock)?;
    // Lightweight thread on which the device lives.
    let storage = reactors.spawn(ThreadBuilder::new("storage"))?;

    // An emulated SSD, which needs no hardware. Other devices are opened by URI as well, such as
    // `file:/var/tmp/disk`, `tcp://…` or `pcie:…`.
    let name = "emu:ram".parse()?;
    let device = Opener::new(&clock)?.open(&name, Claim::WriteOnce, &storage).wait()?;

    // The buffer moves into the operation and comes back with the result; meanwhile the SSD owns
    // it.
    let mut buffer = device.buffer(device.limits().block_size).ok_or("no memory for a buffer")?;
    buffer.store(0, b"ten million");
    let buffer = block_on(device.write(7, buffer))?;
    block_on(device.flush()).map_err(|why| why.to_string())?;
    let buffer = block_on(device.read(7, buffer))?;

    let mut text = [0; 11];
    buffer.load(0, &mut text);
    assert_eq!(&text, b"ten million");
    println!("block 7 of {} holds: {}", device.limits().block_count, text.escape_ascii());
    Ok(())
}
