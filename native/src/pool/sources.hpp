// What a pool's settings mean on its device.
#pragma once

#include "../driver/driver.hpp"
#include "errors.hpp"
#include "options.hpp"

namespace streampool::pool {

// Parts of the device's memory become bytes; the source of segments becomes one that this device has for this kind of
// memory. An error where an option asks for what the device or the source cannot do.
Errc settle_sources(driver::Driver& driver, Kind kind, Options* options, Failure* failure);

}  // namespace streampool::pool
