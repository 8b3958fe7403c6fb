//! One block, written and read back: all that there is to using a device.

use std::error::Error;

use host::{Clock, Cores};
use reactor::{ReactorOptions, Reactors, ThreadPlan};
use smol::block_on;
use tenmil::aio::{Claim, Opener};

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    // One thread on each core. They poll while there is work, and sleep while there is none.
    let clock = Clock::start();
    let reactors = Reactors::start(&Cores::allowed(), &ReactorOptions::default(), &clock)?;
    // On one of them the device lives.
    let storage = reactors.spawn(ThreadPlan::new("storage"))?;

    // An SSD that is emulated, which needs no hardware. A file, an SSD behind a network or one on the
    // bus is opened by its name, too: `file:/var/tmp/disk`, `tcp://…`, `pcie:…`.
    let name = "emu:ram".parse()?;
    let device = Opener::new(&clock)?.open(&name, Claim::WriteOnce, &storage).wait()?;

    // A buffer goes with the operation, and comes back with the answer: meanwhile the SSD has it.
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
