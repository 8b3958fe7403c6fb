//! A storage application as an async task, on the reactor that also polls the SSD. It opens the SSD
//! itself: what takes its time then is done elsewhere, and the reactor goes on.

use std::error::Error;

use host::{Clock, Cores};
use reactor::task::Tasks;
use reactor::{ReactorOptions, Reactors, ThreadPlan};
use tenmil::aio::{Claim, Device, NotDone, Opener};

async fn write_and_read_back(device: Device) -> Result<bool, NotDone> {
    let mut written = device.buffer(4096).expect("memory for a buffer");
    let empty = device.buffer(4096).expect("memory for another");
    written.store(0, b"ten million");
    let written = device.write(7, written).await?;
    device.flush().await?;
    let read = device.read(7, empty).await?;
    Ok(read.to_vec() == written.to_vec())
}

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let clock = Clock::start();
    let reactors = Reactors::start(&Cores::allowed(), &ReactorOptions::default(), &clock)?;
    let thread = reactors.spawn(ThreadPlan::new("storage"))?;
    let tasks = Tasks::start(&thread, "tasks", 64).map_err(|_| "the thread takes no messages")?;

    let (opener, home) = (Opener::new(&clock)?, thread.clone());
    let uri = "emu:ram".parse()?;
    let application = async move {
        let device = opener.open(&uri, Claim::WriteOnce, &home).await?;
        Ok::<_, Box<dyn Error + Send + Sync>>(write_and_read_back(device).await?)
    };
    let same = tasks.spawn(application)?.wait()?;
    let same = same.map_err(|error| -> Box<dyn Error> { error })?;
    assert!(same, "what was read is not what was written");
    println!("written and read back on {}", thread.name());
    Ok(())
}
